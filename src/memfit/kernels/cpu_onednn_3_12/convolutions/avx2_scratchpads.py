"""What oneDNN's convolutions for AVX2 ask for besides copies: sums of threads, borders, lists.

Source: the functions named ``init_scratchpad`` and ``init_balancers`` in src/cpu/x64 of oneDNN 3.12
(``jit_avx2_convolution.hpp``, ``jit_avx2_1x1_convolution.hpp``, ``jit_uni_1x1_conv_utils.hpp``,
``jit_uni_dw_conv_kernel_utils.cpp``, ``jit_brgemm_conv_utils.cpp``,
``jit_brgemm_conv_bwd_utils.cpp``, ``cpu_reducer.cpp``), and ``registry_t`` in
src/common/memory_tracking.hpp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from memfit.kernels.cpu_onednn_3_12.convolutions.avx2_choice import BLOCK
from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution
from memfit.kernels.rounding import round_up

ALIGNMENT_BYTES = 128
_FP32 = 4
_PAGE = 4096
_ELEMENT_BYTES = 40
_MOST_SUMS = 1 << 21
_MOST_POINTWISE_JOBS = 8
_MOST_BLOCKS_OUT, _MOST_BLOCKS_IN, _MOST_LAST_BLOCKS_IN = 32, 9, 17
_MOST_LAST_POSITIONS = 1024
_POSITIONS_AT_ONCE, _MOST_POSITIONS_AT_ONCE = 128, 144


def booked_bytes(*sizes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Add up what is asked for, each with room to be aligned in."""
    return sum(size + alignment for size in sizes if size)


def padded_bias_bytes(shape: Convolution, *, is_always_padded: bool = False) -> int:
    """Return the bytes of a bias in whole blocks; none where it is whole already."""
    if not shape.has_bias or shape.out_per_group % BLOCK == 0:
        return 0
    if is_always_padded:
        return booked_bytes(shape.groups * round_up(shape.out_per_group, BLOCK) * _FP32)
    return booked_bytes(round_up(shape.num_out, BLOCK) * _FP32)


def depthwise_bias_bytes(shape: Convolution) -> int:
    """Return the bytes of a depthwise bias in whole blocks; none where it is whole already."""
    if not shape.has_bias or shape.groups % BLOCK == 0:
        return 0
    return booked_bytes(round_up(shape.groups, BLOCK) * _FP32)


def direct_weight_bytes(shape: Convolution, num_threads: int, block_in: int) -> int:
    """Return the bytes for the weight's gradient of the direct kernel."""
    blocks_out = shape.groups * -(-shape.out_per_group // BLOCK)
    jobs = blocks_out * -(-shape.in_per_group // block_in)
    size = math.prod(shape.kernel) * block_in * BLOCK
    depth = math.prod(shape.result[:-2])
    weight = _Sharing.of(num_threads, size, jobs, shape.batch * depth, _MOST_SUMS)
    return (
        padded_bias_bytes(shape, is_always_padded=True)
        + _bias_sums_bytes(shape, num_threads, _MOST_SUMS)
        + weight.sums_bytes()
    )


def pointwise_bytes(shape: Convolution, num_threads: int, *, is_last: bool) -> int:
    """Return the bytes for the result of the pointwise kernel."""
    bias = 0 if is_last else padded_bias_bytes(shape)
    return bias + _used_positions_bytes(shape, num_threads, -(-shape.num_in // BLOCK), is_last)


def pointwise_gradient_bytes(shape: Convolution, num_threads: int, *, is_last: bool) -> int:
    """Return the bytes for the image's gradient of the pointwise kernel."""
    blocks = -(-shape.num_in // BLOCK) if is_last else _MOST_POSITIONS_AT_ONCE // BLOCK
    return _used_positions_bytes(shape, num_threads, blocks, is_last)


def pointwise_weight_bytes(shape: Convolution, num_threads: int, *, is_last: bool) -> int:
    """Return the bytes for the weight's gradient of the pointwise kernel."""
    blocks_out, blocks_in = -(-shape.num_out // BLOCK), -(-shape.num_in // BLOCK)
    at_once_out = blocks_out
    if not is_last or shape.num_out % BLOCK == 0:
        at_once_out = _cut(blocks_out, _MOST_BLOCKS_OUT)
    at_once_in = blocks_in
    is_small = shape.num_in % BLOCK == 0 and math.prod(shape.result) <= _MOST_LAST_POSITIONS
    if not is_last or is_small:
        at_once_in = _cut(blocks_in, _MOST_LAST_BLOCKS_IN if is_last else _MOST_BLOCKS_IN)
    size = at_once_out * at_once_in * BLOCK * BLOCK
    jobs = -(-blocks_out // at_once_out) * -(-blocks_in // at_once_in)
    most = num_threads * size * _MOST_POINTWISE_JOBS
    parts = shape.batch * math.prod(shape.result)
    return (
        padded_bias_bytes(shape, is_always_padded=True)
        + _used_positions_bytes(shape, num_threads, at_once_in, is_last)
        + _bias_sums_bytes(shape, num_threads, most)
        + _Sharing.of(num_threads, size, jobs, parts, most).all_sums_bytes()
    )


def depthwise_weight_bytes(shape: Convolution, num_threads: int, *, is_last: bool) -> int:
    """Return the bytes of sums of a depthwise weight's and bias's gradient, one for each thread."""
    blocks = -(-shape.groups // BLOCK)
    channels = shape.groups if is_last else blocks * BLOCK
    threads = num_threads
    if not is_last:
        threads = min(max(1, num_threads // min(blocks, num_threads)), shape.batch)
    bias = channels * _FP32 * (threads - 1) if shape.has_bias else 0
    return booked_bytes(shape.depthwise_weight_bytes(BLOCK) * (threads - 1), bias)


def batched_product_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes of the lists of products, per thread."""
    return booked_bytes(num_threads * _list_bytes(math.prod(shape.kernel)), alignment=_PAGE)


def strided_gradient_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes of the result's gradient with borders, per thread, for strided kernels."""
    positions = 1
    for result, reach, stride, before, after in zip(
        shape.result, shape.reach, shape.stride, shape.padding, shape.padding_after, strict=True
    ):
        borders = max(0, reach - 1 - before) // stride + max(0, reach - 1 - after) // stride
        positions *= result + borders
    bordered = round_up(positions * shape.num_out, _PAGE) * _FP32
    uneven = 0
    if not shape.is_even:
        row = round_up(shape.image[-1], shape.stride[-1]) * shape.stride[-1]
        uneven = round_up(row * shape.num_in, _PAGE) * _FP32
    sizes = (_list_bytes(math.prod(shape.kernel)), bordered, _PAGE, uneven)
    return booked_bytes(*(num_threads * size for size in sizes), alignment=_PAGE)


def _list_bytes(num_products: int) -> int:
    """Return the bytes of a list of products, of whole pages and then of whole elements."""
    return round_up(round_up(num_products * _ELEMENT_BYTES, _PAGE), _ELEMENT_BYTES)


def _cut(blocks: int, most: int) -> int:
    """Halve or third what is worked on at once until it is small enough."""
    while blocks > most:
        if blocks % 2 == 0:
            blocks //= 2
        elif blocks % 3 == 0:
            blocks //= 3
        else:
            break
    return blocks


def _used_positions_bytes(shape: Convolution, num_threads: int, blocks: int, is_last: bool) -> int:
    """Return the bytes of an image without the positions that strides leave out, per thread."""
    if not shape.is_strided:
        return 0
    channels = shape.num_in if is_last else blocks * BLOCK
    return booked_bytes(num_threads * math.prod(shape.result) * channels * _FP32)


def _bias_sums_bytes(shape: Convolution, num_threads: int, most: int) -> int:
    """Return the bytes with which threads add a bias's gradient up, where they share its blocks."""
    if not shape.has_bias:
        return 0
    jobs = shape.groups * -(-shape.out_per_group // BLOCK)
    return _Sharing.of(num_threads, BLOCK, jobs, shape.batch, most).sums_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sharing:
    """How threads share jobs whose results are added up, such as blocks of a gradient.

    Groups of threads take equal numbers of jobs, and the threads of a group parts of each.
    """

    num_groups: int
    threads: int
    jobs: int
    num_elements: int = 0

    @classmethod
    def of(
        cls, num_threads: int, num_elements: int, num_jobs: int, num_parts: int, most: int
    ) -> _Sharing:
        """Find the least work for one thread; ``most`` elements are kept, of so many each."""
        most_jobs = max(1, most // (num_threads * num_elements))
        first = max(1, num_jobs // num_threads)
        numbers = (min(num_jobs // jobs, num_threads) for jobs in range(first, num_jobs))
        start = min(num_jobs // first, num_threads)
        best, least = cls._with(start, num_threads, num_jobs, num_parts), num_jobs * num_parts
        for num_groups in dict.fromkeys(numbers):
            way = cls._with(num_groups, num_threads, num_jobs, num_parts)
            if way.threads > 1 and way.jobs > most_jobs:
                continue
            work = way.jobs * (-(-num_parts // way.threads) + (way.threads > 1))
            if work < least:
                best, least = way, work
        return replace(best, num_elements=num_elements)

    @classmethod
    def _with(cls, num_groups: int, num_threads: int, num_jobs: int, num_parts: int) -> _Sharing:
        """Give each group of threads as many jobs."""
        threads = min(num_threads // num_groups, num_parts)
        return cls(num_groups=num_groups, threads=threads, jobs=-(-num_jobs // num_groups))

    def sums_bytes(self) -> int:
        """Return the bytes of the sums of all threads but the first of each group."""
        return self._kept_bytes(self.threads - 1, _PAGE)

    def all_sums_bytes(self) -> int:
        """Return the bytes of the sums of all threads."""
        return self._kept_bytes(self.threads, ALIGNMENT_BYTES)

    def _kept_bytes(self, threads: int, alignment: int) -> int:
        if self.threads == 1:
            return 0
        space = self.num_groups * threads * self.jobs * self.num_elements * _FP32
        barriers = booked_bytes(self.num_groups * _PAGE, alignment=_PAGE)
        return booked_bytes(space, alignment=alignment) + barriers
