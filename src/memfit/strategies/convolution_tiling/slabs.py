"""Rows of tensors, and the rule by which a function is computed for some rows only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memfit.strategies.convolution_tiling.capture import Call, Ref

Rows = tuple[int, int]
Slab = tuple[Tensor, int]
"""Rows of a tensor, and the number of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """A call whose rows depend on few rows of its inputs.

    Attributes:
        needs: gives the rows that are needed of each tracked input, by index, for rows of the
            output.
        run: computes rows of the output from slabs of the tracked inputs, and from other values
            by index.
        dim: which dimension of the output holds the rows.
        statistics_of: the index of the input whose statistics it needs, for a norm.
    """

    needs: Callable[[Rows], Mapping[int, Rows]]
    run: Callable[[Mapping[int, Slab], Mapping[int, Tensor], Rows], Tensor]
    dim: int
    statistics_of: int | None = None


def arguments_of(call: Call, names: Sequence[str]) -> dict[str, Any]:
    """Name the arguments of a call of a built-in function."""
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


def python_arguments_of(call: Call) -> dict[str, Any]:
    """Name the arguments of a call of a function in Python, with its defaults."""
    bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def each_dimension(value: Any, rank: int) -> list[Any]:
    """Return one setting for each spatial dimension."""
    if isinstance(value, (tuple, list)):
        return list(value) * rank if len(value) == 1 else list(value)
    return [value] * rank


def filled(
    call: Call, tensors: Mapping[int, Tensor], device: torch.device | None = None
) -> tuple[Any, Any]:
    """Put tensors, and the device that they are on, in the places of a call's arguments."""
    if device is None:
        device = next(iter(tensors.values())).device

    def put(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return tensors[leaf.index]
        if isinstance(leaf, torch.device) and leaf.type == "meta":
            return device
        return leaf

    args, kwargs = torch.utils._pytree.tree_map(
        put, (call.args, dict(call.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Ref)
    )
    return args, kwargs


def cut(slab: Slab, dim: int, rows: Rows) -> Tensor:
    """Return rows of a slab."""
    tensor, first = slab
    if rows == (first, first + tensor.shape[dim]):
        return tensor
    return tensor.narrow(dim, rows[0] - first, rows[1] - rows[0])


def tiles(extent: int, num_tiles: int) -> Iterator[Rows]:
    """Cut rows into tiles; the last may be smaller."""
    size = max(1, -(-extent // num_tiles))
    for start in range(0, extent, size):
        yield start, min(start + size, extent)
