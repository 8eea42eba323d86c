"""Scratch of the CPU's kernels of embeddings in bags, of masks as indices, and of sparse gradients.

Source: the allocator's events of torch 2.13.0+cpu, 2026-11-26, for rows of 2 to 64 values and up to
16,384 indices; kernels in aten/src/ATen/native/EmbeddingBag.cpp and native/sparse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfit.kernels.registration import Operator
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes

_LONG_BYTES = 8
_SUM, _MEAN, _MAX = 0, 1, 2


def _coalesce(*, self: torch.Tensor) -> int:
    """Sort the indices: their places, and two copies of them; a single row is only copied."""
    if self._nnz() <= 1:
        return 0
    copies = 3 + (self.sparse_dim() > 1)
    return copies * self._nnz() * _LONG_BYTES + sum(copied_bytes(self._values()))


def _norm(*, self: torch.Tensor) -> int:
    """Add up rows of a sparse tensor by index first."""
    if self.layout is not torch.sparse_coo or self.is_coalesced():
        return 0
    return num_bytes(self._indices()) + num_bytes(self._values()) + _coalesce(self=self)


def _sparse_mask(*, out: torch.Tensor) -> int:
    """Multiply the rows that were found by ones."""
    values = out._values()
    return num_bytes(values) + values.element_size()


def _index(*, indices: Sequence[torch.Tensor | None], out: torch.Tensor) -> int:
    """Turn a mask into places."""
    masks = [each for each in indices if each is not None and each.dtype is torch.bool]
    if len(masks) != 1 or not out.dim():
        return 0
    return masks[0].dim() * int(out.shape[0]) * _LONG_BYTES


def _with_room(*, out: tuple[torch.Tensor, ...]) -> Any:
    """Give the bags of indices room for one index more, as the kernel does."""
    made, bags, *others = out
    if not bags.numel() or made.device.type != "cpu":
        return NotImplemented
    return (made, bags.new_empty(bags.numel() + 1)[:-1], *others)


def _bags(*, indices: torch.Tensor, mode: int, out: tuple[torch.Tensor, ...]) -> int:
    """Find the bag of each index by a sum that runs along, and how many there are in each."""
    num_bags = out[0].shape[0]
    if mode == _SUM and not out[1].numel():
        return max(_LONG_BYTES, (num_bags - 1) * _LONG_BYTES)
    running = (indices.numel() + 2) * _LONG_BYTES - 2 * num_bags * _LONG_BYTES
    return max(running, int(num_bags * (2 * _LONG_BYTES + out[0].element_size())))


def _bags_backward(
    *,
    grad: torch.Tensor,
    indices: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    mode: int,
    sparse: bool,
    padding_idx: int = -1,
) -> int:
    """Give each index its bag; of a dense gradient they are sorted, of a sparse one parts given."""
    count, width = indices.numel(), grad.element_size()
    if mode == _MAX:
        return bag_size.numel() * (_LONG_BYTES + int(grad.shape[1]) * (_LONG_BYTES + width))
    bags = 0 if offset2bag.numel() else (count + 1) * _LONG_BYTES
    if not sparse:
        return bags + 3 * count * _LONG_BYTES
    parts = (2 * bag_size.numel() + count) * width if mode == _MEAN else 0
    if padding_idx < 0:
        return bags + parts
    rows = count * int(grad.shape[1]) * width
    return bags + rows + max(parts, count * (1 + _LONG_BYTES))


OPERATORS = {
    "_coalesce": Operator(scratch=_coalesce),
    "_embedding_bag": Operator(fake=_with_room, scratch=_bags),
    "_embedding_bag_backward": Operator(scratch=_bags_backward),
    "index.Tensor": Operator(scratch=_index),
    "norm.ScalarOpt_dim": Operator(scratch=_norm),
    "sparse_mask": Operator(scratch=_sparse_mask),
}
