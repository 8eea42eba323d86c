"""Which precision a step computes in, and up to which error results are then equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.trace.modes import OperatorMode

_BOUNDS: Mapping[torch.dtype, float] = {torch.float64: 1e-10, torch.float32: 1e-4}
_COARSEST_BOUND = 2e-2
_ROUNDING = 16.0
"""Times the precision: what a sum of the whole gradient's size may be off by rounding."""
SMALLEST_SHARE = 1e-4
"""Of the norm of all tensors; what is smaller is held against that, since it may be rounding."""


def bound_in(dtype: torch.dtype | None) -> float:
    """Return the relative error up to which results in a type are equal.

    None stands for a job's own types, which are taken to be fp32 until they are seen.
    """
    return _BOUNDS.get(dtype or torch.float32, _COARSEST_BOUND)


FP64_BOUND = bound_in(torch.float64)
"""What is equal up to this in fp64 differs by rounding alone; coarser types hide small terms."""


def smallest_share_in(dtype: torch.dtype) -> float:
    """Return the share of all gradients below which one of them is rounding alone.

    Sums over the batch carry rounding of the size of their terms, however small they end.
    """
    rounding = _ROUNDING * torch.finfo(dtype).eps
    return min(1.0, max(SMALLEST_SHARE, rounding / bound_in(dtype)))


class PrecisionWatch(OperatorMode):
    """Note the lowest floating-point precision that operators compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.lowest = torch.float64

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 1:
                self.lowest = max(self.lowest, leaf.dtype, key=_roughness)
        return out


class CastsKept(OperatorMode):
    """Leave in fp64 what operators would cast from fp64, or from whole numbers, to less.

    A part of a step that insists on fp32, such as ``logits.float()``, is then compared in fp64 too.

    Limits: tensors that a step makes in a lower precision, out of nothing, stay as they are.
    """

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        kwargs = dict(kwargs)
        asked = kwargs.get("dtype")
        if asked is not None and asked.is_floating_point and asked is not torch.float64:
            given = (each.dtype for each in args if isinstance(each, torch.Tensor))
            dtype = next(given, torch.float32)
            if dtype is torch.float64 or not dtype.is_floating_point:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _roughness(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
