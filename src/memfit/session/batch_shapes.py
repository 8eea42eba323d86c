"""Tells how large batches are: the shapes of all they hold, and which of many are the largest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

TensorShape = tuple[tuple[int, ...], str]
"""The sizes of a tensor, and the name of its type."""
BatchShape = tuple[TensorShape, ...]
"""The shapes of all tensors of a batch, in its order."""
_DEEPEST = 6
_PARTS_PER_DOUBLING = 16
"""Sizes that are told apart between a size and its double, when one batch of each size is kept."""
_PARTS_IF_LARGE = 4
_LARGE_ELEMENTS = 1 << 22
"""From here on fewer are kept: four of a size and half as large again are enough of the host."""


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """List the tensors of a batch: of pytrees, mappings of any class, and objects that hold them.

    Limits: objects are entered six levels deep.
    """
    found: list[torch.Tensor] = []
    _gather(batch, found, _DEEPEST)
    return found


def _gather(value: Any, found: list[torch.Tensor], levels: int) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    if levels == 0 or isinstance(value, (str, bytes, int, float)):
        return
    if isinstance(value, Mapping):  # those of transformers are no pytrees
        parts: Any = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        leaves = tree_leaves(value)
        is_leaf = len(leaves) == 1 and leaves[0] is value
        parts = getattr(value, "__dict__", {}).values() if is_leaf else leaves
    for part in parts:
        _gather(part, found, levels - 1)


def shape_of(batch: Any) -> BatchShape:
    """Return the shapes and types of the tensors of a batch."""
    return tuple(
        (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for tensor in batch_tensors(batch)
    )


def num_elements(sample: Any) -> int:
    """Count the elements of what a sample or a batch holds: tensors, arrays, lists of numbers."""
    tensors = batch_tensors(sample)
    if tensors:
        return sum(tensor.numel() for tensor in tensors)
    sizes = [getattr(leaf, "size", 1) for leaf in tree_leaves(sample)]
    return sum(size if isinstance(size, int) else 1 for size in sizes)


@dataclass(frozen=True, slots=True)
class Kept:
    """A batch that was kept, and its place among those that were looked at."""

    position: int
    shape: BatchShape
    batch: Any


class LargestBatches:
    """Keep few of many batches: the largest in every sense, and one of each size.

    The largest by elements comes first, then the longest in each dimension of each tensor and the
    largest of each tensor times its longest dimension, as attention grows. Of each sixteenth of
    a doubling of the elements, a quarter for large batches, the largest is kept as well.
    """

    def __init__(self) -> None:
        self._first: dict[Hashable, tuple[float, Kept]] = {}

    def look(
        self, position: int, batch: Any, copied: Callable[[Any], Any] | None = None
    ) -> BatchShape:
        """Look at a batch, keep it if it is larger than others in some way; return its shape.

        Args:
            position: of the batch among those that are looked at.
            batch: any value that holds tensors.
            copied: makes what is kept, where the batch itself must not be held on to.
        """
        shape = shape_of(batch)
        larger = {
            key: size
            for key, size in _sizes(shape, num_elements(batch)).items()
            if key not in self._first or size > self._first[key][0]
        }
        if larger:
            kept = Kept(position, shape, batch if copied is None else copied(batch))
            self._first.update({key: (size, kept) for key, size in larger.items()})
        return shape

    @property
    def largest(self) -> Kept | None:
        """Return the batch of the most elements, the first of equals; None if there was none."""
        found = self._first.get("elements")
        return None if found is None else found[1]

    def kept(self) -> list[Kept]:
        """Return the batches that were kept, of different shapes, the largest in some way first."""
        ordered = sorted(self._first.items(), key=lambda pair: _rank(pair[0]))
        by_shape: dict[BatchShape, Kept] = {}
        for _, (_, kept) in ordered:
            by_shape.setdefault(kept.shape, kept)
        return list(by_shape.values())


def _rank(key: Hashable) -> tuple[int, float]:
    """Put the keys of the largest before those of sizes, of which the largest comes first."""
    if key == "elements":
        return (0, 0)
    assert isinstance(key, tuple)
    return (2, -key[1]) if key[0] == "size" else (1, 0)


def _sizes(shape: BatchShape, elements: int) -> dict[Hashable, float]:
    """Return in how many ways a batch can be the largest, and how large it is in each."""
    sizes: dict[Hashable, float] = {"elements": elements, ("size", _part(elements)): elements}
    for number, (dimensions, _) in enumerate(shape):
        count = 1
        for place, length in enumerate(dimensions):
            sizes["length", number, place] = length
            count *= length
        sizes["attention", number] = count * max(dimensions, default=1)
    return sizes


def _part(elements: int) -> float:
    """Return which part of which doubling a size lies in."""
    if not elements:
        return 0.0
    parts = _PARTS_IF_LARGE if elements >= _LARGE_ELEMENTS else _PARTS_PER_DOUBLING
    doublings = elements.bit_length() - 1
    base = 1 << doublings
    return doublings + ((elements - base) * parts // base) / parts
