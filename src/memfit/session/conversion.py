"""Turns models and batches into another floating-point precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def converted(values: Any, dtype: torch.dtype) -> Any:
    """Return the floating-point and complex tensors of a pytree in another precision."""
    return tree_map_only(torch.Tensor, lambda tensor: _one_converted(tensor, dtype), values)


def copied(values: Any) -> Any:
    """Copy the tensors of a pytree."""
    return tree_map_only(torch.Tensor, torch.clone, values)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have tensors made inside in this type where none is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _one_converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype is torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
