"""Temporaries inside the CPU's elementwise operators, reductions and losses.

On the CPU, an operand of another dtype than the one computed in is converted as a whole first: a
mask multiplied with activations becomes a tensor of floats, a mask that is summed one of int64.

Source: ``compute_types`` in aten/src/ATen/TensorIterator.cpp and the allocator's events (torch
2.13.0+cpu, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

_FP32 = 4
_NO_REDUCTION = 0
_CONDITIONAL = "where"
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"}
_ARITHMETIC = {
    "add",
    "addcdiv",
    "addcmul",
    "div",
    "mul",
    "pow",
    "remainder",
    "rsub",
    "sub",
    "where",
}
_BOUNDS = {"clamp", "clamp_max", "clamp_min", "fmax", "fmin", "fmod", "maximum", "minimum"}
_FUNCTIONS = {"atan2", "cos", "erf", "exp", "expm1", "hypot", "log", "log1p", "log2", "reciprocal"}
_FUNCTIONS |= {"rsqrt", "sigmoid", "sin", "sqrt", "tan", "tanh", "xlogy"}
_PROMOTING = frozenset(_COMPARISONS | _ARITHMETIC | _BOUNDS | _FUNCTIONS)
_REDUCTIONS = {"all", "any", "cumprod", "cumsum", "linalg_vector_norm", "nansum", "prod", "sum"}
_MEAN = "mean"


def elementwise_bytes(operator: str, args: tuple[Any, ...], out: Any) -> int:
    """Get the bytes that an operator takes for operands of other dtypes and for its own steps."""
    rule = _LOSSES.get(operator)
    if rule is not None:
        return rule(args)
    if not isinstance(out, torch.Tensor):
        return 0
    if operator in _REDUCTIONS or operator == _MEAN:
        return _reduced_bytes(operator, args, out)
    name = operator.removesuffix("_")
    return _converted_bytes(name, args, out) if name in _PROMOTING else 0


def _converted_bytes(name: str, args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Return the bytes of operands converted to the dtype computed in, and of a result in it."""
    operands = args[1:] if name == _CONDITIONAL else args
    tensors = [each for each in operands if isinstance(each, torch.Tensor) and each.dim()]
    if not tensors or all(each.dtype == out.dtype for each in tensors):
        return 0
    common = _common_dtype(operands, tensors)
    if name not in _COMPARISONS and out.dtype.is_floating_point and not common.is_floating_point:
        common = out.dtype
    num_elements = sum(each.numel() for each in tensors if each.dtype != common)
    if name not in _COMPARISONS and out.dtype != common:
        num_elements += out.numel()
    return int(num_elements * common.itemsize)


def _common_dtype(operands: tuple[Any, ...], tensors: list[torch.Tensor]) -> torch.dtype:
    """Return the dtype that operands are promoted to; numbers count less than tensors."""
    if len(tensors) == 1:
        others = [each for each in operands if each is not tensors[0]]
        others = [each for each in others if isinstance(each, (int, float, torch.Tensor))]
        return torch.result_type(tensors[0], others[0]) if others else tensors[0].dtype
    common = tensors[0].dtype
    for each in tensors[1:]:
        common = torch.promote_types(common, each.dtype)
    return common


def _reduced_bytes(operator: str, args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Return the bytes of an input that is converted before it is reduced."""
    tensor = args[0]
    if tensor.dtype != out.dtype:
        return int(tensor.numel() * out.element_size())
    if operator == _MEAN and tensor.element_size() < _FP32:
        return int((tensor.numel() + out.numel()) * _FP32)  # added up in fp32
    return 0


def _mean_of_elements(num_temporaries: int) -> Callable[[tuple[Any, ...]], int]:
    """Return the rule of a loss, ``(input, target, reduction)``, from its temporaries."""

    def num_bytes(args: tuple[Any, ...]) -> int:
        if len(args) > 2 and args[2] == _NO_REDUCTION:
            return 0
        return num_temporaries * _num_bytes(args[0])

    return num_bytes


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_LOSSES: Mapping[str, Callable[[tuple[Any, ...]], int]] = MappingProxyType(
    {
        "binary_cross_entropy_with_logits": lambda args: 2 * _num_bytes(args[0]),
        "mse_loss": _mean_of_elements(1),
        "smooth_l1_loss": _mean_of_elements(1),
        # Two steps of its formula live beside the gradient.
        "soft_margin_loss_backward": lambda args: 2 * _num_bytes(args[1]),
    }
)
