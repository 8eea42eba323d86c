"""What torch's own convolutions take on the CPU, of what oneDNN doesn't compute.

They unfold images into columns, and convolve groups one by one.

Source: ConvolutionMM2d.cpp, ConvolutionMM3d.cpp, NaiveDilatedConvolution.cpp,
NaiveConvolutionTranspose2d.cpp, NaiveConvolutionTranspose3d.cpp and, for groups, Convolution.cpp in
aten/src/ATen/native of torch 2.13, and the allocator's events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution

_FP32 = 4
_UNFOLDED = "Slow2d"
UNFOLDED_VOLUMES = "Slow3d"
_DILATED = frozenset(("SlowDilated2d", "SlowDilated3d"))
_TRANSPOSED = "SlowTranspose2d"
_TRANSPOSED_VOLUMES = "SlowTranspose3d"


def takes_channels_last(backend: str) -> bool:
    """Return whether a kernel takes channels last as they are, as those of volumes don't."""
    return not backend.endswith("3d")


def forward_bytes(backend: str, shape: Convolution, *, has_bias: bool, is_last: bool) -> int:
    """Return the bytes that a convolution takes beside its result."""
    if backend == UNFOLDED_VOLUMES:
        return 0 if _is_own_columns(shape) else _volume_column_bytes(shape)
    if shape.groups == 1:
        return _forward_bytes(backend, shape, has_bias=has_bias)
    one = _one_group(shape)
    image, result = _operands(one)
    copied = image if _is_copied(one, is_last=is_last) else 0
    inside = _forward_bytes(backend, one, has_bias=has_bias)
    excess = max(0, image - result) if backend == _TRANSPOSED_VOLUMES else 0
    before = (shape.groups - 1) * excess
    return max(shape.groups * (result + excess), before + copied + inside)


def backward_bytes(
    backend: str, shape: Convolution, wanted: Sequence[bool], *, is_last: bool
) -> int:
    """Return the bytes that the gradients of image, weight and bias take beside themselves."""
    if shape.groups == 1:
        return _gradients_bytes(backend, shape, wanted, is_last=is_last)
    one = _one_group(shape)
    copied = sum(_operands(one)) if _is_copied(one, is_last=is_last) else 0
    joined = shape.groups * sum(_wanted_bytes(one, wanted))
    return max(joined, copied + _gradients_bytes(backend, one, wanted, is_last=is_last))


def volume_gradients_bytes(
    shape: Convolution, wanted: Sequence[bool], copied: tuple[int, int, int]
) -> int:
    """Return the bytes for the gradients of volumes: of the image's, then of the weight's.

    The first are given back before there are gradients of weight and bias. ``copied``: the bytes of
    the copies of the result's gradient, the image and the weight.
    """
    _, weight, bias = _wanted_bytes(shape, wanted)
    result_copy, image_copy, weight_copy = copied
    columns = _volume_column_bytes(shape)
    peaks = [0]
    if wanted[0]:
        peaks.append(result_copy + weight_copy + columns - weight - bias)
    if wanted[1]:
        unfolded = 0 if _is_own_columns(shape) else columns
        peaks.append(result_copy + image_copy + unfolded)
    if wanted[2]:
        peaks.append(_sum_bytes(shape, is_last=False) - weight)
    return max(peaks)


def _one_group(shape: Convolution) -> Convolution:
    return replace(shape, groups=1, num_in=shape.in_per_group, num_out=shape.out_per_group)


def _operands(shape: Convolution) -> tuple[int, int]:
    """Return the bytes of what torch was given and of what it gives back."""
    found = (shape.image_bytes(), shape.result_bytes())
    return found[::-1] if shape.is_transposed else found


def _is_copied(shape: Convolution, *, is_last: bool) -> bool:
    """Return whether the channels of a group don't lie side by side."""
    return is_last or shape.batch > 1


def _wanted_bytes(shape: Convolution, wanted: Sequence[bool]) -> tuple[int, int, int]:
    """Return the bytes of the gradients of image, weight and bias, as far as they are wanted."""
    channels = shape.num_in if shape.is_transposed else shape.num_out
    return (
        _operands(shape)[0] * wanted[0],
        shape.weight_bytes() * wanted[1],
        channels * shape.width * wanted[2],
    )


def _forward_bytes(backend: str, shape: Convolution, *, has_bias: bool) -> int:
    columns = _column_bytes(shape)
    if backend == _UNFOLDED:
        return 0 if _is_own_columns(shape) else shape.batch * columns
    if backend == _TRANSPOSED:
        return shape.batch * columns
    if backend == _TRANSPOSED_VOLUMES:
        ones = math.prod(shape.image) * shape.width if has_bias else 0
        given, found = _operands(shape)
        # The result has the size of what is given before it gets its own, and keeps a larger one.
        return max(given, columns + ones) if given <= found else given - found + columns + ones
    return columns if backend in _DILATED else 0


def _gradients_bytes(
    backend: str, shape: Convolution, wanted: Sequence[bool], *, is_last: bool
) -> int:
    columns = _column_bytes(shape)
    sums = _sum_bytes(shape, is_last=is_last) * wanted[2] - shape.weight_bytes() * wanted[1]
    if backend == _UNFOLDED:
        unfolded = 0 if _is_own_columns(shape) or not wanted[1] else shape.batch * columns
        return max(unfolded, sums, 0)
    if backend in _DILATED:
        return columns + shape.num_out * shape.width * wanted[2]
    columns = 0 if _is_own_columns(shape) and not shape.is_dilated else columns
    if backend == _TRANSPOSED:
        return max(columns, sums)
    return columns + _sum_bytes(shape, is_last=is_last) * wanted[2]


def _column_bytes(shape: Convolution) -> int:
    """Return the bytes of the columns of one image."""
    positions = math.prod(shape.kernel) * math.prod(shape.result)
    return shape.in_per_group * positions * shape.width


def _sum_bytes(shape: Convolution, *, is_last: bool) -> int:
    """Return the bytes in which a bias's gradient below fp32 is added up in fp32.

    Only what does not lie side by side is converted.
    """
    channels = shape.num_in if shape.is_transposed else shape.num_out
    positions = math.prod(shape.image if shape.is_transposed else shape.result)
    if shape.width >= _FP32 or is_last or 1 in {shape.batch, channels, positions}:
        return 0
    return (shape.batch * positions + 1) * channels * _FP32


def _volume_column_bytes(shape: Convolution) -> int:
    """Return the bytes of the columns of all volumes of a batch, in all groups."""
    return shape.batch * shape.groups * _column_bytes(shape)


def _is_own_columns(shape: Convolution) -> bool:
    """Return whether images are not unfolded, since they are their own columns."""
    return shape.is_pointwise and not shape.is_strided and shape.groups == 1
