"""Memory of CUDA kernels that look rows up and add to them: buffers of indices and partial sums.

What torch asks for itself is read off its source; what cub asks for inside comes with an interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.cub import INDEX_BYTES, SLACK_BYTES, radix_sort_bytes, scan_bytes
from memfit.kernels.registration import Operator
from memfit.kernels.rounding import ceil_div, round_up
from memfit.kernels.scratch import Moment, Scratch, highest
from memfit.kernels.tensor_bytes import accumulate_width, copied_bytes, num_bytes

_EMBEDDING = "aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu"
_INDEX_PUT = "index_put_with_sort_kernel, aten/src/ATen/native/cuda/Indexing.cu"
_FEW_INDICES = 3072
_ROWS_PER_PART = 10
_WARP, _MAX_BLOCK = 32, 1024
_ATOMIC_BLOCKS_PER_MULTIPROCESSOR = 4


def _embedding_backward(
    *,
    grad_output: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    out: torch.Tensor,
    card: Card,
) -> Scratch:
    """Return the buffers of an embedding's gradient: sorted indices, then partial sums by row.

    Up to 3072 indices are added in place. More are sorted; each run of equal indices is cut into
    parts of ten rows, whose sums are kept in fp32 in a buffer for as many parts as there could be.
    Torch of 2026 adds with atomics instead where rows are few; for a table so small the interval
    takes in both ways.

    Source: Embedding.cu and EmbeddingBackwardKernel.cu in aten/src/ATen/native/cuda, main branch,
    read 2026-11-21; cub's part as in ``radix_sort_bytes``.
    """
    count, width, columns = indices.numel(), indices.element_size(), int(grad_output.shape[-1])
    copies = copied_bytes(grad_output, indices)
    if count <= _FEW_INDICES and not scale_grad_by_freq:
        return Scratch.exact(_EMBEDDING, copies)
    index_bytes = count * width
    kept = (*copies, index_bytes, index_bytes)
    temporary = radix_sort_bytes(count, width, width, 8 * width)
    sort = Moment(blocks=(*kept, index_bytes, temporary), missing_output_bytes=num_bytes(out))
    kept += (index_bytes,) if scale_grad_by_freq else ()
    unique = Moment(blocks=(*kept, index_bytes, 8, index_bytes, scan_bytes(count)))
    num_segments = min(count, num_weights)
    num_parts = count // _ROWS_PER_PART + num_segments
    offsets = (8, 8, num_segments * width, num_segments * width, num_parts * width)
    kept += (index_bytes, *offsets)
    sums = num_parts * columns * accumulate_width(grad_output.dtype)
    two_pass = Moment(blocks=(*kept, sums))
    blocks = highest((sort, unique, two_pass))
    ways = [sum(blocks)]
    if _may_use_atomics(num_segments, num_parts, columns, card):
        summed = num_weights * columns * 4 if grad_output.element_size() < 4 else 0
        atomic = Moment(blocks=(*kept, num_parts * width, summed))
        ways.append(sum(highest((sort, unique, atomic))))
    return Scratch.between(
        _EMBEDDING, blocks, low_bytes=min(ways), high_bytes=max(ways) + SLACK_BYTES
    )


def _may_use_atomics(num_segments: int, num_parts: int, width: int, card: Card) -> bool:
    padded = round_up(width, _WARP)
    grid = ceil_div(num_segments * padded, min(padded, _MAX_BLOCK))
    return num_parts > 4 * grid and card.by_multiprocessors(partial(_has_room_for, grid))


def _has_room_for(grid: int, num_multiprocessors: int) -> bool:
    return grid < num_multiprocessors * _ATOMIC_BLOCKS_PER_MULTIPROCESSOR


def _index_put(
    *,
    self: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool,
) -> Scratch | None:
    """Return the buffers of ``index_put`` with accumulation, which sorts; none without it.

    Four arrays of 64-bit indices (linear, sorted, their order, a range) and cub's storage. Masks
    are turned into indices whose number depends on data: no rule.

    Source: index_put_with_sort_kernel in aten/src/ATen/native/cuda/Indexing.cu, main branch.
    """
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return None
    if not accumulate:
        return Scratch.exact(_INDEX_PUT)
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    count = shape.numel()
    rows = [size for size, index in zip(self.shape, indices, strict=False) if index is not None]
    num_bits = max(1, (torch.Size(rows).numel() - 1).bit_length())
    whole = count * self.numel() // max(1, torch.Size(rows).numel())
    expanded = whole * values.element_size()
    copies = () if values.numel() == whole and values.is_contiguous() else (expanded,)
    arrays = (count * INDEX_BYTES,) * 4
    temporary = radix_sort_bytes(count, INDEX_BYTES, INDEX_BYTES, num_bits)
    blocks = (*copies, *copied_bytes(self), *arrays, temporary)
    return Scratch.between(
        _INDEX_PUT,
        blocks,
        low_bytes=sum(blocks) - temporary,
        high_bytes=sum(blocks) + count * INDEX_BYTES + SLACK_BYTES,
    )


def _one_hot(*, self: torch.Tensor, num_classes: int) -> Any:
    """Skip the look at the values, which CUDA leaves to its kernels.

    Source: ``one_hot`` in aten/src/ATen/native/Onehot.cpp.
    """
    if num_classes <= 0:
        return NotImplemented
    out = torch.zeros(*self.shape, num_classes, dtype=self.dtype, device=self.device)
    return out.scatter_(-1, self.unsqueeze(-1), 1)


def _nothing() -> Scratch:
    """Return nothing: the kernels work from inputs to outputs."""
    return Scratch.exact("aten/src/ATen/native/cuda")


OPERATORS: Mapping[str, Operator] = {
    "embedding_dense_backward": Operator(scratch=_embedding_backward),
    "one_hot": Operator(choice=_one_hot),
    **dict.fromkeys(("index_put", "_index_put_impl"), Operator(scratch=_index_put)),
    **dict.fromkeys(
        (
            "cat",
            "embedding",
            "gather",
            "index_add",
            "index_select",
            "nll_loss2d_backward",
            "nll_loss2d_forward",
            "nll_loss_backward",
            "nll_loss_forward",
            "scatter_add",
        ),
        Operator(scratch=_nothing),
    ),
}
