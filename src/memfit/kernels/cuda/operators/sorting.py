"""Memory of CUDA kernels that sort, scan, count or draw: cub's temporary storage and buffers.

Everything torch asks for itself is read off its source. What cub asks for inside comes with an
interval.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memfit.figures import Certainty
from memfit.kernels.cuda.cub import (
    INDEX_BYTES,
    RADIX_BITS,
    SLACK_BYTES,
    radix_sort_bytes,
    scan_bytes,
)
from memfit.kernels.registration import Operator
from memfit.kernels.rounding import ceil_div
from memfit.kernels.scratch import Scratch
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes
from memfit.units import KIB

_SMALL_SORT = 4096
_LONG_SORT = 1_000_000


def _sort(*, self: torch.Tensor, dim: int) -> Scratch:
    """Return the buffers of ``sort`` along one dimension; rows up to 4096 long need none.

    One long row is sorted with its indices, less than 128 rows at once with (row, index) pairs,
    more row by row in one call.

    Source: aten/src/ATen/native/cuda/Sort.cpp and Sort.cu, main branch; cub's part as in
    ``radix_sort_bytes``.
    """
    source = "launch_stable_sort_kernel, aten/src/ATen/native/cuda/Sort.cu"
    length = int(self.shape[dim]) if self.dim() else 1
    if self.numel() == 0 or length <= _SMALL_SORT:
        return Scratch.exact(source)
    copies = copied_bytes(self.movedim(dim, -1))
    rows, width = self.numel() // length, self.element_size()
    blocks: tuple[int, ...]
    if rows == 1 or length >= _LONG_SORT:
        temporary = radix_sort_bytes(length, width, INDEX_BYTES, 8 * width)
        blocks = (length * INDEX_BYTES, temporary)
    elif rows < 128:
        pairs = self.numel() * INDEX_BYTES
        temporary = radix_sort_bytes(self.numel(), width, INDEX_BYTES, 8 * width)
        blocks = (pairs, pairs, self.numel() * width, temporary)
    else:
        blocks = (self.numel() * INDEX_BYTES, self.numel() * (width + INDEX_BYTES))
    total = sum(blocks) + sum(copies)
    return Scratch.between(
        source,
        (*copies, *blocks),
        low_bytes=total * 9 // 10,
        high_bytes=total * 11 // 10 + SLACK_BYTES,
    )


def _topk(*, self: torch.Tensor, dim: int) -> Scratch:
    """Return the buffers of ``topk``: a copy where the row isn't the last dimension, and counters.

    Long rows are worked on by several blocks, each with 256 counters of two bytes and a few words
    per row. How many blocks depends on the card, so the counters are a guess.

    Source: aten/src/ATen/native/cuda/TensorTopK.cpp and TensorTopK.cu, main branch.
    """
    copies = copied_bytes(self)
    length = int(self.shape[dim]) if self.dim() else 1
    rows = self.numel() // max(1, length)
    counters = rows * ceil_div(length, _SMALL_SORT) * 2**RADIX_BITS * 2
    return Scratch.between(
        "aten/src/ATen/native/cuda/TensorTopK.cu",
        (*copies, counters),
        low_bytes=sum(copies),
        high_bytes=sum(copies) + 4 * counters + SLACK_BYTES,
        certainty=Certainty.GUESS,
    )


def _scan(*, self: torch.Tensor, dim: int) -> Scratch:
    """Return the storage of ``cumsum`` and ``cumprod``: status words, in one dimension only.

    Source: aten/src/ATen/native/cuda/ScanUtils.cuh, torch 2.13; dispatch_scan.cuh of CCCL 2.x.
    """
    source = "aten/src/ATen/native/cuda/ScanUtils.cuh"
    copies = copied_bytes(self)
    if self.dim() == 0 or self.numel() != self.shape[dim]:
        return Scratch.exact(source, copies)
    temporary = scan_bytes(self.numel())
    return Scratch.between(
        source,
        (*copies, temporary),
        low_bytes=sum(copies),
        high_bytes=sum(copies) + 4 * temporary,
    )


def _nonzero(*, self: torch.Tensor) -> Scratch:
    """Return the storage of ``nonzero``: a count, and status words of cub's selection.

    Source: aten/src/ATen/native/cuda/Nonzero.cu; dispatch_select_if.cuh of CCCL 2.x.
    """
    copies = copied_bytes(self)
    temporary = scan_bytes(self.numel())
    return Scratch.between(
        "aten/src/ATen/native/cuda/Nonzero.cu",
        (*copies, INDEX_BYTES, temporary),
        low_bytes=sum(copies),
        high_bytes=sum(copies) + 4 * temporary,
    )


def _unique(*, self: torch.Tensor, return_inverse: bool) -> Scratch:
    """Return the buffers of ``unique``: sorted keys with their order, and cub's storage.

    With inverse indices asked for, the order is sorted along and counted up: four arrays of
    64-bit indices. Which of them are alive together is a guess.

    Source: aten/src/ATen/native/cuda/UniqueCub.cu, main branch.
    """
    count, keys, width = self.numel(), num_bytes(self), self.element_size()
    values = INDEX_BYTES if return_inverse else 0
    temporary = radix_sort_bytes(count, width, values, 8 * width)
    arrays = (count * INDEX_BYTES,) * (2 if return_inverse else 0)
    blocks = (*copied_bytes(self), keys, *arrays, temporary)
    return Scratch.between(
        "aten/src/ATen/native/cuda/UniqueCub.cu",
        blocks,
        low_bytes=keys,
        high_bytes=sum(blocks) + 2 * count * INDEX_BYTES + SLACK_BYTES,
        certainty=Certainty.GUESS,
    )


def _random_permutation(*, n: int) -> Scratch:
    """Return the buffers of ``randperm``: random keys and a range are sorted together.

    Source: aten/src/ATen/native/cuda/Randperm.cu, main branch; keys take 4 or 8 bytes by length,
    and short permutations are drawn on the CPU, hence the interval.
    """
    array = n * INDEX_BYTES
    temporary = radix_sort_bytes(n, INDEX_BYTES, INDEX_BYTES, 64)
    return Scratch.between(
        "aten/src/ATen/native/cuda/Randperm.cu",
        (array, array, array, temporary),
        low_bytes=0,
        high_bytes=3 * array + temporary + SLACK_BYTES,
        certainty=Certainty.GUESS,
    )


def _multinomial(*, self: torch.Tensor, num_samples: int, replacement: bool) -> Scratch:
    """Return the buffers of ``multinomial``: exponential noise, or normalised and summed weights.

    Without replacement, and for one draw, one array of noise as large as the weights; with it two.

    Source: aten/src/ATen/native/Distributions.cpp and cuda/MultinomialKernel.cu, main branch.
    """
    array = num_bytes(self)
    return Scratch.between(
        "aten/src/ATen/native/cuda/MultinomialKernel.cu",
        (array, array) if replacement and num_samples > 1 else (array,),
        low_bytes=array,
        high_bytes=2 * array + SLACK_BYTES,
    )


def _counts(*, self: torch.Tensor) -> Scratch:
    """Return the least and the largest value, and room for finding them, before values are counted.

    Source: cuda/SummaryOps.cu, main branch.
    """
    return Scratch.between(
        "aten/src/ATen/native/cuda/SummaryOps.cu",
        (self.element_size(), self.element_size()),
        low_bytes=0,
        high_bytes=64 * KIB,
    )


OPERATORS: Mapping[str, Operator] = {
    "multinomial": Operator(scratch=_multinomial),
    "nonzero": Operator(scratch=_nonzero),
    "randperm": Operator(scratch=_random_permutation),
    "sort": Operator(scratch=_sort),
    "topk": Operator(scratch=_topk),
    **dict.fromkeys(("_unique", "_unique2"), Operator(scratch=_unique)),
    **dict.fromkeys(("bincount", "histc"), Operator(scratch=_counts)),
    **dict.fromkeys(("cumsum", "cumprod"), Operator(scratch=_scan)),
}
