"""Memory of CUDA kernels that sort, scan or scatter: cub's temporary storage and index buffers.

Everything torch asks for itself is read off its source. What cub asks for inside is close to that
of cub 2.x and comes with an interval, because its tile sizes change with card and version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit.kernels.base import Scratch
from memfit.kernels.cuda.answers import (
    GUESS,
    Moment,
    accumulate_width,
    between,
    ceil_div,
    copied_bytes,
    highest,
    num_bytes,
    sure,
)
from memfit.kernels.cuda.card import Card

_INDEX = 8
_SMALL_SORT = 4096
_SINGLE_TILE_ITEMS = 256 * 19
_ONESWEEP_THREADS, _ONESWEEP_ITEMS = 384, 21
_RADIX_BITS = 8
_CUB_SLACK_BYTES = 64 * 1024
_SCAN_TILE = 1920

_FEW_INDICES = 3072
_ROWS_PER_PART = 10
_WARP, _MAX_BLOCK = 32, 1024
_ATOMIC_BLOCKS_PER_MULTIPROCESSOR = 4


def radix_sort_bytes(num_items: int, key_bytes: int, value_bytes: int, num_bits: int) -> int:
    """Return the temporary storage of cub's radix sort of pairs.

    A second copy of keys and values to pass them back and forth, one line of 256 counters per tile
    to look back at, and the histograms. A few thousand items are sorted by one block without any.

    Source: cub/device/dispatch/dispatch_radix_sort.cuh of CCCL 2.x (onesweep, sm70 on); the sizes
    of tiles change between versions, which moves the result by less than a tenth.
    """
    widest = max(4, key_bytes, value_bytes)
    if num_items <= _SINGLE_TILE_ITEMS * 4 // widest:
        return 1
    num_passes = ceil_div(num_bits, _RADIX_BITS)
    spare = num_items * (key_bytes + value_bytes) if num_passes > 1 else 0
    tile = _ONESWEEP_THREADS * max(1, _ONESWEEP_ITEMS * 4 // widest)
    digits = 1 << _RADIX_BITS
    return spare + ceil_div(num_items, tile) * digits * 4 + num_passes * digits * _INDEX


def scan_bytes(num_items: int) -> int:
    """Return the temporary storage of cub's scans and selections: a status word per tile.

    Source: cub/device/dispatch/dispatch_scan.cuh of CCCL 2.x.
    """
    return 16 * (ceil_div(num_items, _SCAN_TILE) + _WARP)


def embedding_backward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], out: Any, card: Card
) -> Scratch:
    """Return the buffers of an embedding's gradient: sorted indices, then partial sums by row.

    Up to 3072 indices are added in place. More are sorted; each run of equal indices is cut into
    parts of ten rows, whose sums are kept in fp32 in a buffer for as many parts as there could be.
    Torch of 2026 adds with atomics instead where rows are few; for a table so small the interval
    takes in both ways.

    Source: Embedding.cu and EmbeddingBackwardKernel.cu in aten/src/ATen/native/cuda, main branch,
    read 2026-11-21; cub's part as in ``radix_sort_bytes``.
    """
    grad, indices, num_rows = args[0], args[1], int(args[2])
    scale_by_count = bool(args[4])
    count, width = indices.numel(), indices.element_size()
    copies = copied_bytes(grad, indices)
    source = "aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu"
    if count <= _FEW_INDICES and not scale_by_count:
        return sure(source, copies)
    index_bytes = count * width
    kept = (*copies, index_bytes, index_bytes)
    temporary = radix_sort_bytes(count, width, width, 8 * width)
    sort = Moment(blocks=(*kept, index_bytes, temporary), missing_output_bytes=num_bytes(out))
    kept += (index_bytes,) if scale_by_count else ()
    unique = Moment(blocks=(*kept, index_bytes, 8, index_bytes, scan_bytes(count)))
    num_segments = min(count, num_rows)
    num_parts = count // _ROWS_PER_PART + num_segments
    offsets = (8, 8, num_segments * width, num_segments * width, num_parts * width)
    kept += (index_bytes, *offsets)
    sums = num_parts * int(grad.shape[-1]) * accumulate_width(grad.dtype)
    two_pass = Moment(blocks=(*kept, sums))
    blocks = highest((sort, unique, two_pass))
    ways = [sum(blocks)]
    if _may_use_atomics(num_segments, num_parts, int(grad.shape[-1]), card):
        summed = num_rows * int(grad.shape[-1]) * 4 if grad.element_size() < 4 else 0
        atomic = Moment(blocks=(*kept, num_parts * width, summed))
        ways.append(sum(highest((sort, unique, atomic))))
    return between(source, blocks, low_bytes=min(ways), high_bytes=max(ways) + _CUB_SLACK_BYTES)


def _may_use_atomics(num_segments: int, num_parts: int, width: int, card: Card) -> bool:
    padded = ceil_div(width, _WARP) * _WARP
    grid = ceil_div(num_segments * padded, min(padded, _MAX_BLOCK))
    enough = card.likely_multiprocessors * _ATOMIC_BLOCKS_PER_MULTIPROCESSOR
    return grid < enough and num_parts > 4 * grid


def index_put(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch | None:
    """Return the buffers of ``index_put`` with accumulation, which sorts; none without it.

    Four arrays of 64-bit indices (linear, sorted, their order, a range) and cub's storage. Masks
    are turned into indices whose number depends on data: no rule.

    Source: index_put_with_sort_kernel in aten/src/ATen/native/cuda/Indexing.cu, main branch.
    """
    table, indices, values = args[0], args[1], args[2]
    source = "index_put_with_sort_kernel, aten/src/ATen/native/cuda/Indexing.cu"
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        return None
    if not (args[3] if len(args) > 3 else kwargs.get("accumulate", False)):
        return sure(source)
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    count = shape.numel()
    rows = [size for size, index in zip(table.shape, indices, strict=False) if index is not None]
    num_bits = max(1, (torch.Size(rows).numel() - 1).bit_length())
    whole = count * table.numel() // max(1, torch.Size(rows).numel())
    expanded = whole * values.element_size()
    copies = () if values.numel() == whole and values.is_contiguous() else (expanded,)
    arrays = (count * _INDEX,) * 4
    temporary = radix_sort_bytes(count, _INDEX, _INDEX, num_bits)
    blocks = (*copies, *copied_bytes(table), *arrays, temporary)
    return between(
        source,
        blocks,
        low_bytes=sum(blocks) - temporary,
        high_bytes=sum(blocks) + count * _INDEX + _CUB_SLACK_BYTES,
    )


def sort(args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any, _card: Card) -> Scratch:
    """Return the buffers of ``sort`` along one dimension; rows up to 4096 long need none.

    One long row is sorted with its indices, less than 128 rows at once with (row, index) pairs,
    more row by row in one call.

    Source: aten/src/ATen/native/cuda/Sort.cpp and Sort.cu, main branch; cub's part as in
    ``radix_sort_bytes``.
    """
    tensor = args[0]
    dim = int(kwargs.get("dim", _first_int(args[1:], -1)))
    source = "launch_stable_sort_kernel, aten/src/ATen/native/cuda/Sort.cu"
    length = int(tensor.shape[dim]) if tensor.dim() else 1
    if tensor.numel() == 0 or length <= _SMALL_SORT:
        return sure(source)
    along_rows = tensor.movedim(dim, -1)
    copies = copied_bytes(along_rows)
    rows, width = tensor.numel() // length, tensor.element_size()
    blocks: tuple[int, ...]
    if rows == 1 or length >= 1_000_000:
        temporary = radix_sort_bytes(length, width, _INDEX, 8 * width)
        blocks = (length * _INDEX, temporary)
    elif rows < 128:
        pairs = tensor.numel() * _INDEX
        temporary = radix_sort_bytes(tensor.numel(), width, _INDEX, 8 * width)
        blocks = (pairs, pairs, tensor.numel() * width, temporary)
    else:
        blocks = (tensor.numel() * _INDEX, tensor.numel() * (width + _INDEX))
    total = sum(blocks) + sum(copies)
    return between(
        source,
        (*copies, *blocks),
        low_bytes=total * 9 // 10,
        high_bytes=total * 11 // 10 + _CUB_SLACK_BYTES,
    )


def _first_int(args: tuple[Any, ...], default: int) -> int:
    """Return the dimension of ``sort(self, dim)`` and ``sort.stable(self, stable, dim)``."""
    plain = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
    return plain[0] if plain else default


def topk(args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any, _card: Card) -> Scratch:
    """Return the buffers of ``topk``: a copy where the row isn't the last dimension, and counters.

    Long rows are worked on by several blocks, each with 256 counters of two bytes and a few words
    per row. How many blocks depends on the card, so the counters are a guess.

    Source: aten/src/ATen/native/cuda/TensorTopK.cpp and TensorTopK.cu, main branch.
    """
    tensor = args[0]
    dim = int(args[2]) if len(args) > 2 else int(kwargs.get("dim", -1))
    copies = copied_bytes(tensor)
    length = int(tensor.shape[dim]) if tensor.dim() else 1
    rows = tensor.numel() // max(1, length)
    counters = rows * ceil_div(length, _SMALL_SORT) * 2**_RADIX_BITS * 2
    return between(
        "aten/src/ATen/native/cuda/TensorTopK.cu",
        (*copies, counters),
        low_bytes=sum(copies),
        high_bytes=sum(copies) + 4 * counters + _CUB_SLACK_BYTES,
        certainty=GUESS,
    )


def scan(args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card) -> Scratch:
    """Get the storage of ``cumsum`` and ``cumprod``: status words, for one-dimensional input only.

    Source: aten/src/ATen/native/cuda/ScanUtils.cuh, torch 2.13; dispatch_scan.cuh of CCCL 2.x.
    """
    tensor, dim = args[0], int(args[1])
    copies = copied_bytes(tensor)
    source = "aten/src/ATen/native/cuda/ScanUtils.cuh"
    if tensor.dim() == 0 or tensor.numel() != tensor.shape[dim]:
        return sure(source, copies)
    temporary = scan_bytes(tensor.numel())
    return between(
        source,
        (*copies, temporary),
        low_bytes=sum(copies),
        high_bytes=sum(copies) + 4 * temporary,
    )


def nonzero(args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card) -> Scratch:
    """Return the storage of ``nonzero``: a count, and status words of cub's selection.

    Source: aten/src/ATen/native/cuda/Nonzero.cu; dispatch_select_if.cuh of CCCL 2.x.
    """
    tensor = args[0]
    copies = copied_bytes(tensor)
    temporary = scan_bytes(tensor.numel())
    return between(
        "aten/src/ATen/native/cuda/Nonzero.cu",
        (*copies, _INDEX, temporary),
        low_bytes=sum(copies),
        high_bytes=sum(copies) + 4 * temporary,
    )


def unique(args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card) -> Scratch:
    """Return the buffers of ``unique``: sorted keys with their order, and cub's storage.

    With inverse indices asked for, the order is sorted along and counted up: four arrays of
    64-bit indices. Which of them are alive together is a guess.

    Source: aten/src/ATen/native/cuda/UniqueCub.cu, main branch.
    """
    tensor, wants_inverse = args[0], any(arg is True for arg in args[2:3])
    count, keys = tensor.numel(), num_bytes(tensor)
    values = _INDEX if wants_inverse else 0
    temporary = radix_sort_bytes(count, tensor.element_size(), values, 8 * tensor.element_size())
    arrays = (count * _INDEX,) * (2 if wants_inverse else 0)
    blocks = (*copied_bytes(tensor), keys, *arrays, temporary)
    return between(
        "aten/src/ATen/native/cuda/UniqueCub.cu",
        blocks,
        low_bytes=keys,
        high_bytes=sum(blocks) + 2 * count * _INDEX + _CUB_SLACK_BYTES,
        certainty=GUESS,
    )


def random_permutation(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return the buffers of ``randperm``: random keys and a range are sorted together.

    Source: aten/src/ATen/native/cuda/Randperm.cu, main branch; keys take 4 or 8 bytes by length,
    and short permutations are drawn on the CPU, hence the interval.
    """
    count = int(args[0])
    array = count * _INDEX
    temporary = radix_sort_bytes(count, _INDEX, _INDEX, 64)
    return between(
        "aten/src/ATen/native/cuda/Randperm.cu",
        (array, array, array, temporary),
        low_bytes=0,
        high_bytes=3 * array + temporary + _CUB_SLACK_BYTES,
        certainty=GUESS,
    )


def multinomial(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return the buffers of ``multinomial``: exponential noise, or normalised and summed weights.

    Without replacement, and for one draw, one array of noise as large as the weights; with it two.

    Source: aten/src/ATen/native/Distributions.cpp and cuda/MultinomialKernel.cu, main branch.
    """
    weights, num_draws = args[0], int(args[1])
    replace = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    array = num_bytes(weights)
    blocks = (array, array) if replace and num_draws > 1 else (array,)
    return between(
        "aten/src/ATen/native/cuda/MultinomialKernel.cu",
        blocks,
        low_bytes=array,
        high_bytes=2 * array + _CUB_SLACK_BYTES,
    )
