"""What convolutions take beside their results: copies in oneDNN's layouts, or torch's own columns.

oneDNN lays images out in blocks of as many channels as the processor computes at once, 16 or 8, so
an image of 2 channels becomes one of 16 or 8. ``convolutions`` has the rules for each instruction
set, and those for torch's own kernels, which serve what oneDNN does not: fp64, one small image, and
types that oneDNN lacks on a processor, such as bf16 and fp16 without AVX-512.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.kernels.cpu_onednn_3_12.convolutions import kernels_here, own
from memfit.kernels.cpu_onednn_3_12.convolutions.layouts import Kernels
from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution
from memfit.kernels.registration import Operator
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes

_SETTINGS = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
_ONEDNN = "Mkldnn"
_NAMELESS = "???"


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
    is_last = _is_used_last(backend, input, weight)
    copied = _copied_bytes(is_last, input, weight)
    if backend != _ONEDNN:
        return copied + own.forward_bytes(backend, shape, has_bias=has_bias, is_last=is_last)
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
    is_last = _is_used_last(backend, input, weight)
    if backend == own.UNFOLDED_VOLUMES:
        each = [_copied_bytes(is_last, tensor) for tensor in (grad_output, input, weight)]
        return own.volume_gradients_bytes(shape, wanted, (each[0], each[1], each[2]))
    copied = _copied_bytes(is_last, grad_output, input, weight)
    if backend != _ONEDNN:
        return copied + own.backward_bytes(backend, shape, wanted, is_last=is_last)
    grad_image = num_bytes(input) * wanted[0]
    bias = grad_output.shape[1] * shape.width * wanted[2]
    kept = grad_image + shape.weight_bytes() * wanted[1] + bias
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


def _backend(image: torch.Tensor, weight: torch.Tensor, settings: Any) -> str:
    """Name the kernels that torch chooses: oneDNN's, or its own in fp64 and for one small image."""
    name = str(torch._C._select_conv_backend(image, weight, None, *settings, None).name)
    # torch has no name for oneDNN's transposed convolutions.
    return _ONEDNN if name == _NAMELESS and settings[3] else name


def _is_used_last(backend: str, image: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether channels are last where they are used."""
    if backend != _ONEDNN and not own.takes_channels_last(backend):
        return False
    return _is_last(image) or _is_last(weight)


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
