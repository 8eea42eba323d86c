"""Memory that torch's CUDA reductions take when blocks of threads share the work on an output.

A reduction over the rows of a matrix, such as the gradient of a bias, can take many times the
bytes of its output: the buffer is sized for every thread of every block along the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from memfit.figures import Certainty
from memfit.kernels.cuda.card import Card
from memfit.kernels.registration import Operator
from memfit.kernels.rounding import ceil_div, last_power_of_two
from memfit.kernels.scratch import Scratch
from memfit.kernels.tensor_bytes import accumulate_width, fits_32_bit, num_bytes

_SOURCE = "setReduceConfig, ReduceConfig in aten/src/ATen/native/cuda/Reduce.cuh, torch 2.13"
_MAX_THREADS = 512
_WARP = 32
_VECTOR = 4
_VECTORIZE_FROM = 128
_MIN_VALUES, _MAX_VALUES = 16, 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A reduction as the iterator sees it: fused dimensions, reduced ones first.

    Sizes and strides are in elements.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    num_reduced: int

    @property
    def inputs_per_output(self) -> int:
        return math.prod(self.sizes[: self.num_reduced])

    @property
    def num_outputs(self) -> int:
        return math.prod(self.sizes[self.num_reduced :])

    @property
    def is_fastest_reduced(self) -> bool:
        """Return whether neighbours in memory are added to each other."""
        if self.num_reduced == len(self.sizes):
            return True
        return self.strides[0] < self.strides[self.num_reduced]

    @property
    def fastest_stride(self) -> int:
        if not self.sizes:
            return 1
        return self.strides[0 if self.is_fastest_reduced else self.num_reduced]

    @property
    def output_vector(self) -> int:
        """Return how many neighbouring outputs one thread works on (get_output_vec_size)."""
        if self.is_fastest_reduced or self.fastest_stride != 1:
            return 1
        extents = [self.sizes[self.num_reduced]]
        extents += [s for i, s in enumerate(self.strides) if i != self.num_reduced]
        vector = _VECTOR
        for extent in extents:
            while extent % vector:
                vector //= 2
        return vector


def _reduction(
    *, self: torch.Tensor, card: Card, dim: int | Sequence[int] | None = None
) -> Scratch:
    """Return the buffer and the counters of a sum over dimensions, all of them if none is given.

    Exact for sums, means, products and norms of tensors that 32 bits can index, once the number
    of multiprocessors is known. Larger tensors are reduced part by part, which is not followed.

    Source: Reduce.cuh of torch 2.13, as shipped with the wheel; read 2026-11-21.
    """
    dims = [dim] if isinstance(dim, int) else dim
    blocks = reduction_blocks(self, dims or None, card)
    if card.knows_multiprocessors and fits_32_bit(self):
        return Scratch.exact(_SOURCE, blocks)
    return Scratch.between(
        _SOURCE, blocks, low_bytes=0, high_bytes=2 * sum(blocks), certainty=Certainty.GUESS
    )


def _log_sum_exp(
    *, self: torch.Tensor, dim: Sequence[int], out: torch.Tensor, card: Card
) -> Scratch:
    """Return the exponentials, the largest values, and what their sum takes.

    Source: logsumexp_out_impl in aten/src/ATen/native/ReduceOps.cpp, main branch.
    """
    exponentials = self.numel() * out.element_size()
    summing = reduction_blocks(self, dim or None, card)
    return Scratch.between(
        "aten/src/ATen/native/ReduceOps.cpp", (exponentials, num_bytes(out), *summing)
    )


def reduction_blocks(
    tensor: torch.Tensor, dims: Sequence[int] | None, card: Card
) -> tuple[int, ...]:
    """Return the requests of a reduction: the staging buffer and one counter per block."""
    if tensor.numel() == 0:
        return ()
    work = _work(tensor, dims)
    vector = work.output_vector
    width, height = _block(work, vector)
    step_input = width if work.is_fastest_reduced else 1
    step_output = 1 if work.is_fastest_reduced else width
    values = ceil_div(work.inputs_per_output, step_input)
    if values < min(height * 16, _MAX_VALUES):
        return ()  # every warp has an output of its own, so no two blocks share one
    values = ceil_div(work.inputs_per_output, step_input * height)
    grid = ceil_div(work.num_outputs // vector, step_output)
    per_multiprocessor = card.threads_per_multiprocessor // (width * height)
    shares = card.by_multiprocessors(partial(_shares_on, values, grid, per_multiprocessor))
    if shares == 1:
        return ()
    staged = work.num_outputs * shares
    if not work.is_fastest_reduced:
        staged *= width * vector
    return (staged * accumulate_width(tensor.dtype), 4 * grid)


def _work(tensor: torch.Tensor, dims: Sequence[int] | None) -> _Work:
    """Order the dimensions as torch's iterator does, and fuse those that follow in memory."""
    reduced = {d % tensor.dim() for d in dims} if dims is not None else set(range(tensor.dim()))
    found = [
        (d not in reduced, stride, size)
        for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1
    ]
    fused: list[tuple[bool, int, int]] = []
    for kept, stride, size in sorted(found):
        if fused and fused[-1][0] == kept and fused[-1][1] * fused[-1][2] == stride:
            _, first, extent = fused.pop()
            fused.append((kept, first, extent * size))
        else:
            fused.append((kept, stride, size))
    return _Work(
        sizes=tuple(size for _, _, size in fused),
        strides=tuple(stride for _, stride, _ in fused),
        num_reduced=sum(not kept for kept, _, _ in fused),
    )


def _block(work: _Work, vector: int) -> tuple[int, int]:
    """Return the width and height of a block of threads (set_block_dimension)."""
    if work.is_fastest_reduced:
        along, across = work.inputs_per_output, work.num_outputs
        if work.fastest_stride == 1 and work.num_reduced == 1 and along >= _VECTORIZE_FROM:
            along //= _VECTOR
    else:
        along, across = work.num_outputs // vector, work.inputs_per_output
    threads = _MAX_THREADS // vector
    widest = min(last_power_of_two(along), threads)
    tallest = min(last_power_of_two(across), threads)
    height = min(tallest, threads // min(widest, _WARP))
    return min(widest, threads // height), height


def _shares_on(values: int, grid: int, per_multiprocessor: int, num_multiprocessors: int) -> int:
    resident = num_multiprocessors * per_multiprocessor
    if values < _MAX_VALUES or grid > resident:
        return 1
    wanted = min(ceil_div(resident, grid), ceil_div(values, _MIN_VALUES))
    return max(wanted, ceil_div(values, _MAX_VALUES))


OPERATORS: Mapping[str, Operator] = {
    **dict.fromkeys(
        ("sum", "mean", "prod", "amax", "amin", "linalg_vector_norm", "norm"),
        Operator(scratch=_reduction),
    ),
    "logsumexp": Operator(scratch=_log_sum_exp),
}
