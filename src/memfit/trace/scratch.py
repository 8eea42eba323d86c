"""Memory that CPU kernels take and give back inside one operator, which dispatch does not see.

The rules give bytes on top of the operator's outputs. They were read off the allocator's events
(torch 2.13.0+cpu, oneDNN 3.x, AVX-512, 2026-11-21) and agree with them to the byte for attention,
for an LSTM whose sizes are multiples of 16 (others come out up to 6 % low) and for torch's own
convolution; for oneDNN's convolutions up to some 100 KiB of JIT buffers per thread. oneDNN lays
data out in blocks of 16 channels; processors without AVX-512 use 8, which these rules don't follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from memfit.trace.optimizer_scratch import eight_bit_update, thirty_two_bit_update

_BLOCK = 16
_PAGE_BYTES = 4096
_FP32 = 4
_JIT_BYTES = 4664
_DEEP = 512
_PANEL_BYTES = 82_752
_DEEP_PANEL_BYTES = 131_904
_TURNED_PANEL_BYTES = 468_096
_TILE_BYTES = 66_176


def scratch_bytes(operator: str, args: tuple[Any, ...], out: Any) -> int:
    """Give the bytes that a CPU kernel takes besides its outputs; 0 where no rule is known."""
    rule = _RULES.get(operator)
    return 0 if rule is None else rule(args, out)


def lstm_workspace_bytes(args: tuple[Any, ...]) -> int:
    """Give the bytes that oneDNN's LSTM keeps from forward for backward.

    Gates, two arrays of states and one of outputs in the input's type, one padded and two plain
    arrays of states in fp32, each on whole pages (``set_workspace_sizes`` in
    src/cpu/rnn/rnn_utils.hpp of oneDNN; fitted to the page on seventeen shapes).
    """
    lstm = _Lstm.of(args)
    cells = lstm.num_steps * lstm.num_rows
    states = 2 * (lstm.num_steps + 1) * lstm.num_rows
    widest = max(lstm.num_inputs, lstm.hidden)
    return (
        _pages(cells * _leading(4 * lstm.hidden, lstm.width) * lstm.width)
        + 2 * _pages(states * _leading(widest, lstm.width) * lstm.width)
        + _pages(states * _leading(widest, _FP32) * _FP32)
        + 2 * _pages(states * lstm.hidden * _FP32)
        + _pages(cells * _leading(lstm.hidden, lstm.width) * lstm.width)
    )


@dataclass(frozen=True, slots=True)
class _Lstm:
    """The sizes of one LSTM layer; ``width`` is the bytes of an element of its input."""

    num_steps: int
    num_rows: int
    num_inputs: int
    hidden: int
    width: int

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> _Lstm:
        """Read the sizes off an operator's arguments: input (T, B, I), weights (4H, I), (4H, H)."""
        num_steps, num_rows, num_inputs = args[0].shape
        hidden = args[2].shape[1]
        return cls(num_steps, num_rows, num_inputs, hidden, args[0].element_size())

    @property
    def packed_weight_bytes(self) -> int:
        """Give the bytes of both weights in oneDNN's layout."""
        gates = 4 * self.hidden
        columns = _leading(gates, _FP32) if self.width == _FP32 else gates
        return (self.num_inputs + self.hidden) * columns * self.width

    @property
    def gate_scratch_bytes(self) -> int:
        """Give the bytes of the gates: of all steps in fp32, of one step in bf16."""
        num_steps = self.num_steps if self.width == _FP32 else 1
        gates = num_steps * self.num_rows * _leading(4 * self.hidden, _FP32) * _FP32
        states = self.num_rows * _leading(self.hidden, _FP32) * _FP32
        return _pages(gates) + 2 * _pages(states) + _JIT_BYTES


def _lstm_forward(args: tuple[Any, ...], _out: Any) -> int:
    """Packed weights, the sum of both biases, and the gates."""
    lstm = _Lstm.of(args)
    return 4 * lstm.hidden * lstm.width + lstm.packed_weight_bytes + lstm.gate_scratch_bytes


def _lstm_backward(args: tuple[Any, ...], _out: Any) -> int:
    """As forward, with gradients of bias and last states; in bf16 fp32 copies of gradients too."""
    lstm = _Lstm.of(args)
    gates, states = 4 * lstm.hidden, 2 * lstm.num_rows * lstm.hidden
    num_bytes = _lstm_forward(args, _out) + gates * _FP32 + states * lstm.width
    grad_out = args[10]
    if not grad_out.is_contiguous():
        num_bytes += _num_bytes(grad_out)
    if lstm.width == _FP32:
        return num_bytes
    outputs = lstm.num_steps * lstm.num_rows * lstm.hidden
    weights = (lstm.num_inputs + lstm.hidden) * _leading(gates, _FP32)
    return num_bytes + (outputs + states + weights) * _FP32


def _conv_forward(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Copies in oneDNN's blocked layout: input and weight first, the output later."""
    image, weight = args[0], args[1]
    if _is_unfolded(image, weight, args[3:9]):
        return _unfolded_bytes(weight, out)
    packed_weight = _num_bytes(weight)
    if _is_channels_last(image):
        is_dense = args[8] == 1
        return 2 * packed_weight if is_dense else packed_weight
    # Images with few channels are read as they are.
    packed_image = _num_bytes(image) if image.shape[1] >= _BLOCK else 0
    return max(packed_image + packed_weight, _num_bytes(out))


def _conv_backward(args: tuple[Any, ...], _out: Any) -> int:
    """Copies for the gradient of the input, then for the gradient of the weight."""
    if _is_unfolded(args[1], args[2], args[4:10]):
        copied = 0 if args[0].is_contiguous() else _num_bytes(args[0])
        return copied + (_unfolded_bytes(args[2], args[0]) if args[10][1] else 0)
    grad_out, image, weight = (_num_bytes(tensor) for tensor in args[:3])
    packed = _packed_weight_bytes(args[2], groups=args[9])
    # Below fp32, the gradient of the weight is added up in an fp32 copy of the same layout.
    added_up = packed * _FP32 // args[2].element_size() if args[2].element_size() < _FP32 else 0
    if _is_channels_last(args[1]) or _is_channels_last(args[0]):
        if args[9] > 1:
            return packed + max(added_up, weight)
        copied_grad_out = 0 if _is_channels_last(args[0]) else grad_out
        return copied_grad_out + weight + packed + max(added_up, weight)
    if not args[10][0]:
        return grad_out + max(added_up, weight)
    peak = max(
        grad_out + weight + image,
        2 * image,
        2 * image + grad_out + packed + added_up,
        image + packed + weight,
    )
    return peak - (image + weight)


def _is_unfolded(image: torch.Tensor, weight: torch.Tensor, settings: tuple[Any, ...]) -> bool:
    """Say whether torch's own kernel is used: in fp64, and for one small image at a time.

    ``settings``: stride, padding, dilation, transposed, output padding, groups.
    """
    backend = torch._C._select_conv_backend(image, weight, None, *settings, None)
    return bool(backend.name == "Slow2d")


def _unfolded_bytes(weight: torch.Tensor, result: torch.Tensor) -> int:
    """Give the bytes of an image unfolded into columns, one per position of the result.

    Source: slow_conv2d in aten/src/ATen/native/ConvolutionMM2d.cpp, torch 2.13.
    """
    _, num_in, *kernel = weight.shape
    num_positions = result.numel() // result.shape[1]
    if math.prod(kernel) == 1:
        return 0  # the image is its own columns, strides and padding apart
    return num_in * math.prod(kernel) * num_positions * weight.element_size()


def _packed_weight_bytes(weight: torch.Tensor, groups: int) -> int:
    """Give the bytes of a weight (out, in / groups, ...) in blocks of channels, group by group."""
    num_out, num_in, *kernel = weight.shape
    channels = groups * _padded(num_out // groups) * _padded(num_in)
    return channels * math.prod(kernel) * weight.element_size()


def _product(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Packed panels of a matrix product below fp32, per thread; more where the left one is turned.

    Typical of 25 products read off; sizes differ by a factor of two either way with how oneDNN cuts
    a product up, and thousands of inner entries take up to 1.2 MiB per thread.
    """
    if out.element_size() >= _FP32:
        return 0
    left, num_threads = args[-2], torch.get_num_threads()
    if left.shape[-1] < _DEEP:
        return num_threads * _PANEL_BYTES
    if left.stride(-1) == 1:
        return num_threads * _DEEP_PANEL_BYTES
    # Few rows are not shared out among threads, so there the left one is packed once.
    num_packed = num_threads if left.shape[-2] >= _DEEP else 1
    return num_packed * _TURNED_PANEL_BYTES + (num_threads - num_packed) * _TILE_BYTES


def _attention_forward(args: tuple[Any, ...], _out: Any) -> int:
    """One tile of scores, and its running maximum and sum, per thread.

    Source: cpu_flash_attention in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, torch 2.13.
    """
    query, key = args[0], args[1]
    rows, columns = _tile(query.shape[2], key.shape[2])
    per_thread = rows * columns + 2 * rows + rows * int(query.shape[3])
    return torch.get_num_threads() * per_thread * _FP32


def _attention_backward(args: tuple[Any, ...], _out: Any) -> int:
    """Two tiles, of scores and of their gradients, per thread, and a dense copy of the gradient.

    Source: as for forward; the gradient is made contiguous with tokens before heads.
    """
    rows, columns = _tile(args[1].shape[2], args[2].shape[2])
    gradient = args[0].transpose(1, 2)
    copied = 0 if gradient.is_contiguous() else gradient.numel() * gradient.element_size()
    return torch.get_num_threads() * 2 * rows * columns * _FP32 + int(copied)


def _tile(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Give the tile that the attention kernel works on."""
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(512, num_keys)


def _leading(extent: int, width: int) -> int:
    """Give oneDNN's leading dimension: whole cache lines, but no multiple of 256 entries."""
    line = 64 // width
    padded = -(-extent // line) * line
    return padded + line if padded % 256 == 0 else padded


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _padded(num_channels: int) -> int:
    return -(-num_channels // _BLOCK) * _BLOCK


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_channels_last(tensor: torch.Tensor) -> bool:
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


_RULES: Mapping[str, Callable[[tuple[Any, ...], Any], int]] = MappingProxyType(
    {
        "addmm": _product,
        "mm": _product,
        "convolution": _conv_forward,
        "convolution_backward": _conv_backward,
        "mkldnn_rnn_layer": _lstm_forward,
        "mkldnn_rnn_layer_backward": _lstm_backward,
        "_scaled_dot_product_flash_attention_for_cpu": _attention_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "bitsandbytes.optimizer_update_8bit_blockwise": eight_bit_update,
        "bitsandbytes.optimizer_update_32bit": thirty_two_bit_update,
    }
)
