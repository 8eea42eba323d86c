"""Memory that torch's CUDA reductions take when blocks of threads share the work on an output.

A reduction over the rows of a matrix, such as the gradient of a bias, can take many times the
bytes of its output: the buffer is sized for every thread of every block along the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.base import Scratch
from memfit.kernels.cuda.answers import (
    GUESS,
    accumulate_width,
    between,
    ceil_div,
    fits_32_bit,
    last_power_of_two,
    sure,
)
from memfit.kernels.cuda.card import Card

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


def reduction_scratch(tensor: torch.Tensor, dims: Sequence[int] | None, card: Card) -> Scratch:
    """Return the buffer and the counters of a sum over ``dims`` (all of them for None).

    Exact for sums, means, products and norms of tensors that 32 bits can index, once the number
    of multiprocessors is known. Larger tensors are reduced part by part, which is not followed.

    Source: Reduce.cuh of torch 2.13, as shipped with the wheel; read 2026-11-21.
    """
    blocks = reduction_blocks(tensor, dims, card)
    if card.num_multiprocessors is not None and fits_32_bit(tensor):
        return sure(_SOURCE, blocks)
    return between(_SOURCE, blocks, low_bytes=0, high_bytes=2 * sum(blocks), certainty=GUESS)


def reduction_blocks(
    tensor: torch.Tensor, dims: Sequence[int] | None, card: Card
) -> tuple[int, ...]:
    """Get the requests of ``reduction_scratch``: the staging buffer and one counter per block."""
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
    shares = _shares(values, grid, _resident_blocks(card, width * height))
    if shares == 1:
        return ()
    staged = work.num_outputs * shares
    if not work.is_fastest_reduced:
        staged *= width * vector
    return (staged * accumulate_width(tensor.dtype), 4 * grid)


def reduction(args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any, card: Card) -> Scratch:
    """Read the dimensions of ``sum.dim_IntList``, ``mean.dim``, ``amax`` off their arguments."""
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    return reduction_scratch(args[0], _as_dims(dims), card)


def norm_reduction(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], _out: Any, card: Card
) -> Scratch:
    """Read the dimensions of ``linalg_vector_norm(self, ord, dim, ...)`` off its arguments."""
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    return reduction_scratch(args[0], _as_dims(dims), card)


def _as_dims(dims: Any) -> Sequence[int] | None:
    if isinstance(dims, int) and not isinstance(dims, bool):
        return [dims]
    return dims if isinstance(dims, list | tuple) and dims else None


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


def _resident_blocks(card: Card, num_threads: int) -> int:
    per_multiprocessor = card.threads_per_multiprocessor // num_threads
    return card.likely_multiprocessors * per_multiprocessor


def _shares(values: int, grid: int, resident: int) -> int:
    """Return among how many blocks the inputs of one output are shared out."""
    if values < _MAX_VALUES or grid > resident:
        return 1
    wanted = min(ceil_div(resident, grid), ceil_div(values, _MIN_VALUES))
    return max(wanted, ceil_div(values, _MAX_VALUES))
