"""Copies in oneDNN's layouts that convolutions take and give back, on processors with AVX-512.

oneDNN lays images out in blocks of 16 channels, so an image of 2 channels becomes one of 16. Which
kernel serves which convolution was read off its own log (``ONEDNN_VERBOSE=profile_exec``) beside
the allocator's events, over some thousands of shapes (torch 2.13.0+cpu, oneDNN 3.12, 2026-11-21).

Limits: processors without AVX-512 use blocks of 8 channels and other kernels, those with AMX other
kernels below fp32. Of grouped convolutions that are not depthwise, the hungriest kernel is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.kernels.cpu_onednn_3_12.convolutions import kernels_here
from memfit.kernels.cpu_onednn_3_12.convolutions.layouts import Kernels
from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution
from memfit.kernels.registration import Operator
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes

_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
_ONEDNN = "Mkldnn"
_NAMELESS = "???"
_UNFOLDED = "Slow2d"
_UNFOLDED_VOLUMES = "Slow3d"
_ONE_BY_ONE = frozenset(("SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d"))


def _forward(
    *,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    **arguments: Any,
) -> int:
    """Return the bytes that ``convolution`` takes beside its result."""
    settings = [arguments[name] for name in _SETTINGS]
    backend = _backend(input, weight, settings)
    has_bias = bias is not None
    shape = Convolution.of(input, weight, out, settings, has_bias=has_bias)
    is_last = _is_last(input) or _is_last(weight)
    copied = _copied_bytes(is_last, input, weight)
    if backend == _UNFOLDED_VOLUMES:
        return copied + (0 if _is_own_columns(shape) else _volume_column_bytes(shape))
    if backend != _ONEDNN:
        # Groups are convolved one by one, and their results joined.
        joined = num_bytes(out) if shape.groups > 1 else 0
        return copied + joined + _column_bytes(shape, backend)
    if settings[3]:
        peaks = _data_peaks(kernels_here(), shape, is_last=is_last, has_bias=has_bias)
    else:
        peaks = _result_peaks(kernels_here(), shape, is_last=is_last)
    return copied + max(peaks) - num_bytes(out)


def _backward(
    *,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    output_mask: Sequence[bool],
    **arguments: Any,
) -> int:
    """Return the bytes that ``convolution_backward`` takes beside the gradients.

    The image's gradient comes first, then those of weight and bias.
    """
    settings, wanted = [arguments[name] for name in _SETTINGS], output_mask
    backend = _backend(input, weight, settings)
    shape = Convolution.of(input, weight, grad_output, settings, has_bias=wanted[2])
    is_last = _is_last(input) or _is_last(weight)
    copied = _copied_bytes(is_last, grad_output, input, weight)
    grad_image = num_bytes(input) * wanted[0]
    bias = grad_output.shape[1] * shape.width * wanted[2]
    kept = grad_image + shape.weight_bytes() * wanted[1] + bias
    if backend == _UNFOLDED_VOLUMES:
        return copied + _volume_gradients_bytes(shape, wanted, kept - grad_image)
    if backend != _ONEDNN:
        split = shape.image_bytes() + shape.result_bytes() if shape.groups > 1 else 0
        columns = 0 if backend == _UNFOLDED and not wanted[1] else _column_bytes(shape, backend)
        return copied + split // shape.groups + (kept if split else 0) + columns
    peaks = [0]
    if wanted[0] and settings[3]:
        peaks += _result_peaks(kernels_here(), shape, is_last=is_last)
    elif wanted[0]:
        peaks += _data_peaks(kernels_here(), shape, is_last=is_last, has_bias=False)
    if wanted[1] or wanted[2]:
        peaks += [
            grad_image + peak
            for peak in _weight_peaks(kernels_here(), shape, bias, is_last=is_last)
        ]
    return copied + max(0, int(max(peaks) - kept))


def _result_peaks(kernels: Kernels, shape: Convolution, *, is_last: bool) -> list[int]:
    """Return what the result takes, itself included."""
    found = kernels.forward_layouts(shape, torch.get_num_threads(), is_last=is_last)
    return [each.result_peak(shape.result_bytes()) for each in found]


def _data_peaks(
    kernels: Kernels, shape: Convolution, *, is_last: bool, has_bias: bool
) -> list[int]:
    """Return what the image's gradient takes, itself included."""
    num_threads = torch.get_num_threads()
    found = kernels.data_layouts(shape, num_threads, is_last=is_last, has_bias=has_bias)
    return [each.image_peak(shape.image_bytes()) for each in found]


def _weight_peaks(kernels: Kernels, shape: Convolution, bias: int, *, is_last: bool) -> list[int]:
    """Return what the gradients of weight and bias take, themselves included."""
    found = kernels.weight_layouts(shape, torch.get_num_threads(), is_last=is_last)
    return [each.weight_peak(shape.weight_bytes(), bias) for each in found]


def _column_bytes(shape: Convolution, backend: str) -> int:
    """Return the bytes of torch's own columns, of the whole batch or of one image.

    Source: slow_conv2d in aten/src/ATen/native/ConvolutionMM2d.cpp and
    slow_conv_dilated_all_cpu_template in NaiveDilatedConvolution.cpp, torch 2.13.
    """
    if backend != _UNFOLDED and backend not in _ONE_BY_ONE:
        return 0
    num_images = shape.batch if backend == _UNFOLDED else 1
    if backend == _UNFOLDED and shape.is_pointwise and not shape.is_strided:
        return 0  # the image is its own columns
    positions = num_images * math.prod(shape.kernel) * math.prod(shape.result)
    columns = shape.in_per_group * positions * shape.width
    if "Transpose" not in backend:
        return columns
    return columns + shape.result_bytes() + math.prod(shape.image) * shape.width


def _volume_column_bytes(shape: Convolution) -> int:
    """Return the bytes of the columns of all volumes of a batch and all groups.

    Source: compute_columns3d in aten/src/ATen/native/ConvolutionMM3d.cpp, torch 2.13.
    """
    positions = shape.batch * math.prod(shape.kernel) * math.prod(shape.result)
    return shape.num_in * positions * shape.width


def _volume_gradients_bytes(shape: Convolution, wanted: Sequence[bool], later_bytes: int) -> int:
    """Return what is taken beside the gradients: columns of the image's, then of the weight's.

    The first are given back before there are gradients of weight and bias, of ``later_bytes``.
    """
    columns = _volume_column_bytes(shape)
    if wanted[1] and not _is_own_columns(shape):
        return columns
    return max(0, columns - later_bytes) if wanted[0] else 0


def _is_own_columns(shape: Convolution) -> bool:
    """Return whether volumes are not unfolded, since they are their own columns."""
    return shape.is_pointwise and not shape.is_strided and shape.groups == 1


def _backend(image: torch.Tensor, weight: torch.Tensor, settings: Any) -> str:
    """Name the kernels that torch chooses: oneDNN's, or its own in fp64 and for one small image."""
    name = str(torch._C._select_conv_backend(image, weight, None, *settings, None).name)
    # torch has no name for oneDNN's transposed convolutions.
    return _ONEDNN if name == _NAMELESS and settings[3] else name


def _copied_bytes(is_last: bool, *tensors: torch.Tensor) -> int:
    """Return the bytes of copies that have their channels where wanted."""
    wanted = torch.contiguous_format
    if is_last:
        wanted = torch.channels_last if tensors[0].dim() == 4 else torch.channels_last_3d
    return sum(copied_bytes(*tensors, memory_format=wanted))


def _is_last(tensor: torch.Tensor) -> bool:
    """Return whether torch takes a tensor's channels to be last.

    Source: ``is_channels_last_strides_2d`` in c10/core/MemoryFormat.h, torch 2.13.
    """
    if tensor.dim() < 4 or tensor.stride(1) == 0:
        return False
    least = 0
    for dim in (1, *range(tensor.dim() - 1, 1, -1), 0):
        stride = tensor.stride(dim)
        # An image of one channel is taken to have its channels first.
        if stride < least or (dim == 0 and least == tensor.stride(1)):
            return False
        least = stride * max(1, tensor.shape[dim])
    return True


OPERATORS: Mapping[str, Operator] = {
    "convolution": Operator(scratch=_forward),
    "convolution_backward": Operator(scratch=_backward),
}
