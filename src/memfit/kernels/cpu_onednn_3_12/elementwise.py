"""Temporaries inside the CPU's elementwise operators, reductions and losses.

On the CPU, an operand of another dtype than the one computed in is converted as a whole first: a
mask multiplied with activations becomes a tensor of floats, a mask that is summed one of int64.

Source: ``compute_types`` in aten/src/ATen/TensorIterator.cpp and the allocator's events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from memfit.kernels.registration import Operator, Rule
from memfit.kernels.tensor_bytes import num_bytes

_FP32 = 4
_NO_REDUCTION = 0
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor")
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
}
_BOUNDS = {"clamp", "clamp_max", "clamp_min", "fmax", "fmin", "fmod", "maximum", "minimum"}
_FUNCTIONS = {"atan2", "cos", "erf", "exp", "expm1", "hypot", "log", "log1p", "log2", "reciprocal"}
_FUNCTIONS |= {"rsqrt", "sigmoid", "sin", "sqrt", "tan", "tanh", "xlogy"}
_PROMOTING = _ARITHMETIC | _BOUNDS | _FUNCTIONS
_REDUCTIONS = ("all", "any", "cumprod", "cumsum", "linalg_vector_norm", "nansum", "prod", "sum")


def _promoting(*, operands: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of operands converted to the dtype computed in, and of a result in it."""
    return _converted_bytes(operands, out, keeps_result=False)


def _comparing(*, operands: tuple[Any, ...], out: Any) -> int:
    """Return the bytes of operands converted to the dtype that they are compared in."""
    return _converted_bytes(operands, out, keeps_result=True)


def _choosing(*, operands: tuple[Any, ...], out: Any) -> int:
    """Return the bytes as of other operators that promote; a condition is not converted."""
    return _converted_bytes(operands[1:], out, keeps_result=False)


def _converted_bytes(operands: tuple[Any, ...], out: Any, *, keeps_result: bool) -> int:
    """Return the bytes of operands, and of a result that is not bools, in the common dtype."""
    if not isinstance(out, torch.Tensor):
        return 0
    tensors = [each for each in operands if isinstance(each, torch.Tensor) and each.dim()]
    if not tensors or all(each.dtype == out.dtype for each in tensors):
        return 0
    common = _common_dtype(operands, tensors)
    if not keeps_result and out.dtype.is_floating_point and not common.is_floating_point:
        common = out.dtype
    num_elements = sum(each.numel() for each in tensors if each.dtype != common)
    if not keeps_result and out.dtype != common:
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


def _reduction(*, self: torch.Tensor, out: Any) -> int:
    """Return the bytes of an input that is converted before it is reduced."""
    if not isinstance(out, torch.Tensor) or self.dtype == out.dtype:
        return 0
    return self.numel() * out.element_size()


def _mean(*, self: torch.Tensor, out: Any) -> int:
    """Return the bytes as of other reductions; below fp32, all is added up in fp32."""
    if isinstance(out, torch.Tensor) and self.dtype == out.dtype and out.element_size() < _FP32:
        return (self.numel() + out.numel()) * _FP32
    return _reduction(self=self, out=out)


def _mean_of_elements(*, self: torch.Tensor, reduction: int) -> int:
    """Return the bytes of a loss's elements before they are added up."""
    return 0 if reduction == _NO_REDUCTION else num_bytes(self)


def _two_steps(*, self: torch.Tensor) -> int:
    """Return the bytes of two steps of a loss's formula."""
    return 2 * num_bytes(self)


def _also_in_place(names: Iterable[str], rule: Rule) -> Mapping[str, Operator]:
    """Register operators, and those with a second form in place, such as ``add_``, twice."""
    forms = (form for name in names for form in (name, f"{name}_"))
    return {form: Operator(scratch=rule) for form in forms if hasattr(torch.ops.aten, form)}


OPERATORS: Mapping[str, Operator] = {
    **_also_in_place(sorted(_PROMOTING), _promoting),
    **_also_in_place(_COMPARISONS, _comparing),
    "where": Operator(scratch=_choosing),
    **dict.fromkeys(_REDUCTIONS, Operator(scratch=_reduction)),
    "mean": Operator(scratch=_mean),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss"), Operator(scratch=_mean_of_elements)),
    **dict.fromkeys(
        ("binary_cross_entropy_with_logits", "soft_margin_loss_backward"),
        Operator(scratch=_two_steps),
    ),
}
