"""The columns that oneDNN unfolds images into where no kernel of its own takes a convolution.

Source: ``init_conf`` in src/cpu/gemm_convolution_utils.cpp of oneDNN 3.12, in fp32.
"""

from __future__ import annotations

import math

from memfit.kernels.cpu_onednn_3_12.convolutions.avx2_choice import BLOCK
from memfit.kernels.cpu_onednn_3_12.convolutions.avx2_scratchpads import booked_bytes
from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution

_FP32 = 4
_SMALL_PRODUCT = 64 * 1024


def forward_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the result."""
    rows = math.prod(shape.result[-2:])
    depth = math.prod(shape.result[:-2])
    outer = shape.groups * shape.batch * depth
    is_outer = (
        rows // num_threads < 512
        and (depth > 1 or shape.batch > 1 or shape.groups > 2)
        and _is_outer(outer, rows, shape.out_per_group, rows, shape, num_threads)
    )
    return booked_bytes((num_threads if is_outer else 1) * _column_bytes(shape))


def gradient_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the image's gradient."""
    rows, image_rows = math.prod(shape.result[-2:]), math.prod(shape.image[-2:])
    is_outer = (
        (rows // num_threads < 512 or math.prod(shape.kernel) < 64)
        and (shape.batch > 1 or shape.groups > 2)
        and _is_outer(
            shape.groups * shape.batch,
            image_rows,
            shape.in_per_group,
            image_rows,
            shape,
            num_threads,
        )
    )
    return booked_bytes((num_threads if is_outer else 1) * _column_bytes(shape))


def weight_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the weight's gradient."""
    rows = math.prod(shape.result[-2:])
    is_outer = rows // num_threads < 256 and (shape.batch > 1 or shape.groups > 2)
    threads = num_threads if is_outer else 1
    sums = threads * shape.weight_bytes() * _FP32
    return booked_bytes(sums, threads * _column_bytes(shape))


def last_gradient_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the image's gradient, channels last."""
    depth = math.prod(shape.result[:-2])
    sums = math.prod(shape.image) * shape.in_per_group * _FP32 if shape.groups > 1 else 0
    return booked_bytes(num_threads * depth * _column_bytes(shape), num_threads * sums)


def last_weight_bytes(shape: Convolution, num_threads: int) -> int:
    """Return the bytes for the weight's gradient, channels last."""
    rows = math.prod(shape.result[-2:])
    is_outer = rows // num_threads < 256 and (shape.batch > 1 or shape.groups > 2)
    threads = num_threads if is_outer else 1
    sums = threads * shape.weight_bytes() * _FP32
    turned = threads * math.prod(shape.image) * shape.in_per_group * _FP32
    return booked_bytes(threads * _column_bytes(shape), sums, turned)


def _column_bytes(shape: Convolution) -> int:
    """Return the bytes of the columns of one image or, of a volume, one depth."""
    if math.prod(shape.kernel) == 1 and not shape.is_strided and shape.image == shape.result:
        return 0
    positions = math.prod(shape.kernel) * math.prod(shape.result[-2:])
    return shape.in_per_group * positions * _FP32


def _is_outer(
    outer: int, inner: int, channels: int, work: int, shape: Convolution, num_threads: int
) -> bool:
    inner_work = -(-inner // BLOCK) * -(-channels // BLOCK)
    outer_fraction = outer / (-(-outer // num_threads) * num_threads)
    inner_fraction = inner_work / (-(-inner_work // num_threads) * num_threads)
    products = work * shape.in_per_group * shape.out_per_group
    return outer_fraction >= inner_fraction or products // num_threads < _SMALL_PRODUCT
