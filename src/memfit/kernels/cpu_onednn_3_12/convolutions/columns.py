"""The columns that oneDNN unfolds images into where no kernel of its own takes a convolution.

Source: ``init_conf`` in src/cpu/gemm_convolution_utils.cpp of oneDNN 3.12, in fp32.

Limits: a core's second cache is taken to have half a MiB, as oneDNN does where it cannot ask.
"""

from __future__ import annotations

import math

from memfit.kernels.cpu_onednn_3_12.convolutions import column_blocks
from memfit.kernels.cpu_onednn_3_12.convolutions.avx2_choice import BLOCK, VOLUME_DIMS
from memfit.kernels.cpu_onednn_3_12.convolutions.avx2_scratchpads import booked_bytes
from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution
from memfit.units import GIB

_FP32 = 4
_SMALL_PRODUCT = 64 * 1024
_MOST_TIMES_TENSORS = 15
_LEAST_GRADIENT_FRACTION, _LEAST_WEIGHT_FRACTION = 0.1, 0.05


def forward_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the result."""
    columns = _column_bytes(shape)
    if not columns:
        return 0
    if column_blocks.are_cut(shape, num_threads):
        channels, positions = column_blocks.best_cut(shape, num_threads)
        cut = channels * math.prod(shape.kernel) * positions * _FP32
        return booked_bytes(num_threads * cut)
    rows, depth = math.prod(shape.result[-2:]), math.prod(shape.result[:-2])
    outer = shape.groups * shape.batch * depth
    is_outer = (
        rows // num_threads < 512
        and (depth > 1 or _has_parts(shape))
        and _is_outer_better(outer, (rows, shape.out_per_group), shape, rows, num_threads)
    )
    return booked_bytes((num_threads if is_outer else 1) * columns)


def gradient_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the image's gradient."""
    image_rows = math.prod(shape.image[-2:])
    rows = math.prod(shape.result[-2:])
    inner = (image_rows, shape.in_per_group)
    is_outer = (
        (rows // num_threads < 512 or math.prod(shape.kernel) < 64)
        and _has_parts(shape)
        and _is_outer_better(shape.groups * shape.batch, inner, shape, image_rows, num_threads)
    )
    threads = num_threads if is_outer else 1
    limit = _limit_bytes(shape, num_threads)
    return booked_bytes(_kept_columns_bytes(shape, threads, limit, _LEAST_GRADIENT_FRACTION))


def weight_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the weight's gradient; none if they are too many to unfold."""
    limit = _limit_bytes(shape, num_threads)
    sums = shape.weight_bytes() * _FP32
    least = num_threads * (sums + shape.in_per_group * math.prod(shape.kernel) * BLOCK * _FP32)
    is_outer = least < limit and _is_short(shape, num_threads)
    threads = num_threads if is_outer else 1
    booked = booked_bytes(threads * sums)
    if booked > limit:
        return 0
    columns = _kept_columns_bytes(shape, threads, limit - booked, _LEAST_WEIGHT_FRACTION)
    return booked + booked_bytes(columns)


def last_forward_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the result, channels last: columns, and an image that is turned."""
    columns = _column_bytes(shape)
    is_outer = False
    if columns and column_blocks.are_last_cut(shape):
        positions, is_outer = column_blocks.best_last_cut(shape, num_threads)
        columns = shape.in_per_group * math.prod(shape.kernel) * positions * _FP32
    is_outer = is_outer or _is_last_outer(shape, math.prod(shape.result[-2:]), num_threads)
    threads = num_threads if is_outer else 1
    turned = math.prod(shape.image) * shape.in_per_group * _FP32
    return booked_bytes(threads * columns, threads * turned)


def last_gradient_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the image's gradient, channels last."""
    depth = math.prod(shape.result[:-2])
    is_outer = _is_last_outer(shape, math.prod(shape.image[-2:]), num_threads)
    threads = num_threads if is_outer else 1
    sums = math.prod(shape.image) * shape.in_per_group * _FP32 if shape.groups > 1 else 0
    return booked_bytes(threads * depth * _column_bytes(shape), threads * sums)


def last_weight_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the weight's gradient, channels last; none if they are too many."""
    limit = _limit_bytes(shape, num_threads)
    turned = math.prod(shape.image) * shape.in_per_group * _FP32
    columns, sums = _column_bytes(shape), shape.weight_bytes()
    is_outer = num_threads * (columns + turned + sums * _FP32) < limit
    threads = num_threads if is_outer and _is_short(shape, num_threads) else 1
    booked = booked_bytes(threads * columns, threads * sums * _FP32, threads * turned)
    return 0 if booked > limit else booked


def _column_bytes(shape: Convolution) -> int:
    """Return the bytes of the columns of one image or, of a volume, one depth."""
    if math.prod(shape.kernel) == 1 and not shape.is_strided and shape.image == shape.result:
        return 0
    positions = math.prod(shape.kernel) * math.prod(shape.result[-2:])
    return shape.in_per_group * positions * _FP32


def _kept_columns_bytes(
    shape: Convolution, threads: int, available: int, least_fraction: float
) -> int:
    """Return the bytes of all threads' columns, cut down where they are too many."""
    columns = threads * _column_bytes(shape)
    if columns <= available:
        return columns
    position = threads * shape.in_per_group * math.prod(shape.kernel) * _FP32
    return position * max(BLOCK, int(available // position * least_fraction))


def _limit_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the most bytes that are asked for."""
    tensors = shape.image_bytes() + shape.weight_bytes() + shape.result_bytes()
    return min(GIB, _MOST_TIMES_TENSORS * num_threads * tensors)


def _has_parts(shape: Convolution) -> bool:
    return shape.batch > 1 or shape.groups > 2


def _is_short(shape: Convolution, num_threads: int) -> bool:
    return math.prod(shape.result[-2:]) // num_threads < 256 and _has_parts(shape)


def _is_last_outer(shape: Convolution, work: int, num_threads: int) -> bool:
    """Return whether each thread takes images of its own, channels last."""
    image_rows = math.prod(shape.image[-2:])
    is_single = shape.in_per_group == shape.out_per_group == 1 < shape.groups
    is_small = image_rows // num_threads < 64 and shape.batch > 1
    if len(shape.kernel) == VOLUME_DIMS or not (is_single or is_small):
        return False
    inner = (image_rows, shape.in_per_group)
    return _is_outer_better(shape.groups * shape.batch, inner, shape, work, num_threads)


def _is_outer_better(
    outer: int, inner: tuple[int, int], shape: Convolution, work: int, num_threads: int
) -> bool:
    """Return whether threads share images and groups better than rows and channels of one."""
    rows, channels = inner
    inner_work = -(-rows // BLOCK) * -(-channels // BLOCK)
    fractions = [each / (-(-each // num_threads) * num_threads) for each in (outer, inner_work)]
    products = work * shape.in_per_group * shape.out_per_group
    return fractions[0] >= fractions[1] or products // num_threads < _SMALL_PRODUCT
