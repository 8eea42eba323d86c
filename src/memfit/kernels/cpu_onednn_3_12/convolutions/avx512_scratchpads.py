"""What oneDNN's convolutions ask for besides copies: reductions over threads, borders, columns.

Source: the functions named ``init_scratchpad`` and ``balance`` in src/cpu/x64 of oneDNN 3.x, for
AVX-512 (``jit_avx512_common_conv_kernel.cpp``, ``jit_avx512_common_1x1_conv_kernel.cpp``,
``jit_brgemm_conv_bwd_utils.cpp``, ``jit_brgemm_conv_utils.cpp``, ``cpu_reducer.cpp``), and
``gemm_convolution_utils.cpp`` in src/cpu.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution
from memfit.kernels.rounding import round_up

BLOCK = 16
"""Channels of a block of oneDNN's layouts."""

_FP32 = 4
_PAGE = 4096
ALIGNMENT_BYTES = 128
_BARRIER_BYTES = 2 * _PAGE
_ELEMENT_BYTES = 24
_PRODUCT_BYTES = 263_296
_PRODUCT_GRADIENT_BYTES = 9_216
# A halving of the work has to be worth that much memory traffic; oneDNN found them by trying.
_WEIGHT_TRAFFIC, _POINTWISE_WEIGHT_TRAFFIC = 8, 12
_TRAFFIC_SLACK = 1.1
_FEWEST_ROWS = 9
_SHORT_ROW = 14


def padded_bias_bytes(shape: Convolution, block: int = BLOCK) -> int:
    """Return the bytes of a bias in whole blocks; none where it is whole already."""
    if not shape.has_bias or shape.out_per_group % block == 0:
        return 0
    return shape.groups * round_up(shape.out_per_group, block) * _FP32 + ALIGNMENT_BYTES


def pointwise_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for a pointwise convolution: the positions used, and sums below fp32."""
    used = _used_positions_bytes(shape, num_threads)
    return used + _sums_bytes(shape, shape.num_out, num_threads)


def pointwise_gradient_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the image's gradient of a pointwise convolution."""
    used = _used_positions_bytes(shape, num_threads)
    return used + _sums_bytes(shape, shape.num_in, num_threads)


def strided_gradient_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes of the result's gradient with borders, per thread, for strided kernels."""
    positions = 1
    for result, reach, stride, before, after in zip(
        shape.result, shape.reach, shape.stride, shape.padding, shape.padding_after, strict=True
    ):
        borders = max(0, reach - 1 - before) // stride + max(0, reach - 1 - after) // stride
        positions *= result + borders
    per_thread = round_up(positions * shape.num_out, _PAGE) * shape.width
    per_thread += 2 * _PAGE + _ELEMENT_BYTES
    uneven = 0
    if not shape.is_even:
        per_thread += round_up(shape.image[-1] * shape.num_in, _PAGE) * shape.width
        uneven = _PAGE
    if shape.width < _FP32:
        per_thread += round_up(shape.image[-1] * 4 * BLOCK * _FP32, _PAGE)
    return num_threads * per_thread + 3 * _PAGE + uneven


def batched_product_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes of the lists of products, per thread, of convolutions in channels-last."""
    sums = 2 * _PAGE if shape.width < _FP32 else 0
    return num_threads * (_PAGE + _ELEMENT_BYTES + sums) + _PAGE


def product_bytes(num_threads: int) -> int:
    """Return the bytes of the panels of a convolution that is one matrix product."""
    return num_threads * _PRODUCT_BYTES


def product_gradient_bytes(shape: Convolution) -> int:
    """Return the bytes for the gradients of a convolution that is one matrix product."""
    return _PRODUCT_GRADIENT_BYTES + shape.result_bytes() * _FP32 // shape.width


def column_bytes(shape: Convolution, num_threads: int, *, is_gradient: bool = False) -> int:
    """Return the bytes of the columns of as many groups of images as are worked on at a time."""
    if math.prod(shape.kernel) == 1 and not shape.is_strided:
        return 0
    at_work = min(num_threads, shape.batch * shape.groups)
    positions = math.prod(shape.kernel) * math.prod(shape.result[-2:])
    if shape.width == _FP32:
        return at_work * shape.in_per_group * positions * _FP32 + ALIGNMENT_BYTES
    # Below fp32 sums are kept in fp32.
    width = _FP32 if is_gradient else shape.width
    sums = shape.in_per_group * math.prod(shape.image) if is_gradient else 0
    sums = sums or shape.out_per_group * math.prod(shape.result)
    per_thread = shape.in_per_group * positions * width + sums * _FP32
    return at_work * per_thread + 4 * ALIGNMENT_BYTES


def column_weight_bytes(shape: Convolution, num_threads: int) -> int:
    """Get the bytes for a weight's gradient from columns: they, and four sums for each thread."""
    at_work = min(num_threads, shape.batch * shape.groups)
    sums = at_work * 4 * shape.weight_bytes() * _FP32 // shape.width
    return column_bytes(shape, num_threads) + sums + 2 * ALIGNMENT_BYTES


def weight_bytes(
    shape: Convolution, num_threads: int, *, block_in: int, is_last: bool = False
) -> int:
    """Get the bytes of sums of a weight's and a bias's gradient, one for each part of a batch."""
    parts = _batch_parts(shape, num_threads, block_in)
    if shape.width < _FP32:
        turned = _turned_bytes(shape, parts, block_in, is_last=is_last)
        return turned + (_BARRIER_BYTES if num_threads > 1 else 0)
    num_bytes = padded_bias_bytes(shape) + _shared_bias_bytes(shape, num_threads)
    if parts > 1:
        sums = shape.weight_bytes(BLOCK, block_in) + round_up(shape.num_out, BLOCK) * _FP32
        num_bytes += (parts - 1) * sums + ALIGNMENT_BYTES + _BARRIER_BYTES
    return num_bytes


def narrow_weight_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes of the sums of AVX2's kernel, which serves narrow images."""
    block = BLOCK // 2
    jobs = -(-shape.num_out // block)
    bias = round_up(shape.num_out, block) * _FP32
    weight, weight_jobs = shape.weight_bytes(block, block), jobs * -(-shape.num_in // block)
    return (
        padded_bias_bytes(shape, block)
        + (_shared_sums_bytes(shape, bias, jobs, num_threads) if shape.has_bias else 0)
        + _shared_sums_bytes(shape, weight, weight_jobs, num_threads)
    )


def pointwise_weight_bytes(shape: Convolution, num_threads: int, *, is_last: bool = False) -> int:
    """Return the bytes for the weight's gradient of a pointwise convolution."""
    num_bytes = padded_bias_bytes(shape) + _shared_bias_bytes(shape, num_threads)
    num_bytes += _used_positions_bytes(shape, num_threads)
    sums = shape.weight_bytes(BLOCK, BLOCK) * _FP32 // shape.width
    parts = _batch_parts(shape, num_threads, BLOCK)
    if shape.width < _FP32:
        if is_last or min(shape.result[-2:]) <= _SHORT_ROW:
            num_bytes += num_threads * _turned_positions_bytes(shape)
        num_bytes += _BARRIER_BYTES + 2 * ALIGNMENT_BYTES
        num_bytes += parts * (sums + round_up(shape.num_out, BLOCK) * _FP32)
    elif parts > 1:
        num_bytes += (parts - 1) * sums + ALIGNMENT_BYTES + _BARRIER_BYTES
    return num_bytes


def depthwise_weight_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes of sums of a depthwise weight's and bias's gradient, one for each thread."""
    sums = shape.depthwise_weight_bytes(BLOCK) * _FP32 // shape.width
    bias = round_up(shape.groups, BLOCK) * _FP32
    extra_sums = num_threads - (shape.width == _FP32)
    return extra_sums * (sums + bias) + 2 * ALIGNMENT_BYTES + bias


def _turned_positions_bytes(shape: Convolution) -> int:
    """Get the bytes of an image and a result below fp32 that are turned, two positions at once."""
    blocks = -(-shape.num_in // BLOCK) + -(-shape.num_out // BLOCK)
    return round_up(math.prod(shape.result), 2) * blocks * BLOCK * shape.width


def _turned_bytes(shape: Convolution, parts: int, block_in: int, *, is_last: bool) -> int:
    """Return the bytes for a weight's gradient below fp32: turned images and results, and sums."""
    blocks_in = shape.groups * -(-shape.in_per_group // BLOCK)
    blocks_out = shape.groups * -(-shape.out_per_group // BLOCK)
    rows_in, rows_out = math.prod(shape.image[:-1]), math.prod(shape.result[:-1])
    is_turned = block_in == BLOCK or (is_last and shape.num_in > 1)
    image = blocks_in * rows_in * _turned_row(shape) if is_turned else 0
    result = blocks_out * rows_out * round_up(shape.result[-1], 2)
    sums = shape.weight_bytes(BLOCK, block_in) // shape.width + blocks_out * BLOCK
    turned = parts * (image + result) * BLOCK * shape.width
    return turned + parts * sums * _FP32 + 4 * ALIGNMENT_BYTES + _BARRIER_BYTES


def _turned_row(shape: Convolution) -> int:
    """Return the positions of a row of an image that is turned, with its borders."""
    border = round_up(max(shape.padding[-1], max(0, shape.padding_after[-1]) + 1), 2)
    return round_up(-(-shape.image[-1] // shape.stride[-1]) + border, 2) * shape.stride[-1]


def _used_positions_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes of an image without the positions that strides leave out, per thread."""
    if not shape.is_strided:
        return 0
    positions = math.prod(shape.result)
    return num_threads * positions * round_up(shape.num_in, BLOCK) * shape.width + ALIGNMENT_BYTES


def _sums_bytes(shape: Convolution, num_channels: int, num_threads: int) -> int:
    """Return the bytes of what a pointwise convolution below fp32 adds up in fp32, per thread."""
    if shape.width == _FP32:
        return 0
    positions = math.prod(shape.result)
    return num_threads * positions * round_up(num_channels, BLOCK) * _FP32 + ALIGNMENT_BYTES


def _shared_bias_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes with which threads add a bias's gradient up, where they share its blocks."""
    if not shape.has_bias:
        return 0
    num_blocks = shape.groups * -(-shape.out_per_group // BLOCK)
    return _shared_sums_bytes(shape, num_blocks * BLOCK * _FP32, num_blocks, num_threads)


def _shared_sums_bytes(shape: Convolution, num_bytes: int, num_jobs: int, num_threads: int) -> int:
    """Return the bytes of sums over the batch that several threads share, and their barriers.

    Groups of threads take equal numbers of jobs, and the threads of a group parts of the batch.
    """
    least_work, threads, groups = math.inf, 1, 1
    for jobs in range(max(1, num_jobs // num_threads), max(2, num_jobs)):
        num_groups = min(num_jobs // jobs, num_threads)
        sharing = min(num_threads // num_groups, shape.batch)
        samples = -(-shape.batch // sharing)
        work = -(-num_jobs // num_groups) * (samples + (sharing > 1))
        if work < least_work:
            least_work, threads, groups = work, sharing, num_groups
    if threads == 1:
        return 0
    return (threads - 1) * num_bytes + (groups + 2) * _PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What threads share when a weight's gradient is computed, and what a part of it moves.

    Rows of image and result are shared out, and blocks of their channels.
    """

    rows_in: int
    rows_out: int
    row_in_cost: float
    row_out_cost: float
    weight_cost: float
    blocks_in: int
    blocks_out: int

    def traffic(self, parts: int, threads_out: int, threads_in: int) -> float:
        """Return what one thread reads and writes."""
        blocks_in, blocks_out = -(-self.blocks_in // threads_in), -(-self.blocks_out // threads_out)
        return (
            -(-self.rows_in // parts) * blocks_in * self.row_in_cost
            + -(-self.rows_out // parts) * blocks_out * self.row_out_cost
            + blocks_in * blocks_out * self.weight_cost
        )

    def steps(self, parts: int, threads_out: int, threads_in: int) -> int:
        """Return how many blocks one thread computes."""
        blocks_in, blocks_out = -(-self.blocks_in // threads_in), -(-self.blocks_out // threads_out)
        return -(-self.rows_out // parts) * blocks_in * blocks_out

    def ways(self, num_threads: int, most_parts: int) -> list[tuple[int, int, int]]:
        """List the ways to share, as oneDNN goes through them."""
        found = []
        for parts in range(1, min(num_threads, most_parts) + 1):
            beside = num_threads // parts
            for threads_out in range(1, min(beside, self.blocks_out) + 1):
                threads_in = min(beside // threads_out, self.blocks_in)
                found.append((parts, threads_out, threads_in))
        return found


def _batch_parts(shape: Convolution, num_threads: int, block_in: int) -> int:
    """Say into how many parts oneDNN cuts the batch for a weight's gradient."""
    if num_threads <= max(1, shape.groups - 1):
        return 1
    num_threads_left = num_threads // shape.groups
    if shape.is_pointwise and shape.is_aligned:
        work, most_parts = _pointwise_work(shape)
        ways = work.ways(num_threads_left, most_parts)
        best = _last_least(ways, work.traffic)
        limit = shape.batch
    elif shape.width < _FP32:
        work, most_parts = _turned_work(shape, block_in)
        best = _last_least(work.ways(num_threads_left, most_parts), work.traffic)
        num_threads, limit = num_threads_left, most_parts
    else:
        work, most_parts = _work(shape, block_in)
        ways = work.ways(num_threads_left, most_parts)
        best = _cheaper_to_compute(work, ways, _last_least(ways, work.traffic))
        limit = most_parts
    parts = best[0]
    if num_threads / 2 < parts < num_threads:
        return min(limit, num_threads)
    return parts


def _last_least(
    ways: list[tuple[int, int, int]], cost: Callable[[int, int, int], float]
) -> tuple[int, int, int]:
    """Return the last of the cheapest ways."""
    return min(reversed(ways), key=lambda way: cost(*way))


def _cheaper_to_compute(
    work: _Work, ways: list[tuple[int, int, int]], best: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Move on to ways with less work per thread, if they cost little traffic or save a quarter."""
    least_traffic, least_steps = work.traffic(*best), work.steps(*best)
    for way in ways:
        steps = work.steps(*way)
        is_close = work.traffic(*way) < _TRAFFIC_SLACK * least_traffic
        if (steps <= least_steps and is_close) or 4 * steps <= 3 * least_steps:
            best, least_steps = way, steps
    return best


def _work(shape: Convolution, block_in: int) -> tuple[_Work, int]:
    """Describe the work of a convolution, and the most parts that its batch can be cut into."""
    height_in, height_out = shape.image[-2], shape.result[-2]
    depth_in, depth_out = math.prod(shape.image[:-2]), math.prod(shape.result[:-2])
    by_rows = not shape.is_dilated and len(shape.kernel) == 2 and height_out > _FEWEST_ROWS
    row_in = shape.image[-1] * depth_in * (1 if by_rows else height_in)
    row_out = shape.result[-1] * depth_out * (1 if by_rows else height_out)
    work = _Work(
        rows_in=shape.batch * (height_in if by_rows else 1),
        rows_out=shape.batch * (height_out if by_rows else 1),
        row_in_cost=block_in * row_in // math.prod(shape.stride),
        row_out_cost=BLOCK * row_out,
        weight_cost=_WEIGHT_TRAFFIC * math.prod(shape.kernel) * block_in * BLOCK,
        blocks_in=-(-shape.in_per_group // block_in),
        blocks_out=-(-shape.out_per_group // BLOCK),
    )
    return work, shape.batch * depth_out * max(1, (height_out if by_rows else 1) // _FEWEST_ROWS)


def _pointwise_work(shape: Convolution) -> tuple[_Work, int]:
    """Describe the work of a pointwise convolution, whose positions come in rows of 7 to 16."""
    positions = math.prod(shape.result)
    row = min(range(BLOCK, 6, -1), key=lambda size: round_up(positions, size) / positions)
    rows = shape.batch * -(-positions // row)
    work = _Work(
        rows_in=rows,
        rows_out=rows,
        row_in_cost=BLOCK * row,
        row_out_cost=BLOCK * row,
        weight_cost=_POINTWISE_WEIGHT_TRAFFIC * BLOCK * BLOCK,
        blocks_in=-(-shape.num_in // BLOCK),
        blocks_out=-(-shape.num_out // BLOCK),
    )
    return work, rows


def _turned_work(shape: Convolution, block_in: int) -> tuple[_Work, int]:
    """Describe the work of a convolution below fp32, and its most parts: rows of the results."""
    rows = shape.batch * math.prod(shape.result[:-1])
    blocks_in, blocks_out = -(-shape.in_per_group // block_in), -(-shape.out_per_group // BLOCK)
    image = block_in * math.prod(shape.image[:-1]) * _turned_row(shape)
    result = BLOCK * math.prod(shape.result[:-1]) * round_up(shape.result[-1], 2)
    weight = math.prod(shape.kernel) * block_in * BLOCK
    moved = shape.batch * (blocks_in * image + blocks_out * result)
    excess = moved / (2 * blocks_in * blocks_out * weight * 2)
    image_weight = max(1, blocks_in // blocks_out) * (4 if excess < 1 else 1)
    work = _Work(
        rows_in=rows,
        rows_out=rows,
        row_in_cost=image_weight * shape.batch * image / rows / math.prod(shape.stride),
        row_out_cost=max(1, blocks_out // blocks_in) * shape.batch * result / rows,
        weight_cost=max(1, int(excess)) * weight,
        blocks_in=blocks_in,
        blocks_out=blocks_out,
    )
    return work, rows
