"""Memory that CPU kernels take and give back inside one operator, which dispatch does not see.

The rules give bytes on top of the operator's outputs. They were read off the allocator's events
(torch 2.13.0+cpu, oneDNN 3.x, AVX-512, 2026-11-21) and agree with them to the byte for the LSTM
workspace and attention, and for convolutions up to some 100 KiB of JIT buffers. oneDNN lays data
out in blocks of 16 channels; processors without AVX-512 use 8, which these rules don't follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

_BLOCK = 16
_PAGE_BYTES = 4096


def scratch_bytes(operator: str, args: tuple[Any, ...], out: Any) -> int:
    """Give the bytes that a CPU kernel takes besides its outputs; 0 where no rule is known."""
    rule = _RULES.get(operator)
    return 0 if rule is None else rule(args, out)


def lstm_workspace_bytes(args: tuple[Any, ...]) -> int:
    """Give the bytes that oneDNN's LSTM keeps from forward for backward.

    Gates, three padded and two plain arrays of states and one of outputs, each on whole pages
    (``set_workspace_sizes`` in src/cpu/rnn/rnn_utils.hpp of oneDNN; fitted to the page on eleven
    shapes).
    """
    num_steps, num_rows, num_inputs = args[0].shape
    hidden = args[2].shape[1]
    width = args[0].element_size()
    cells = num_steps * num_rows * width
    states = 2 * (num_steps + 1) * num_rows * width
    return (
        _pages(cells * _leading(4 * hidden))
        + 3 * _pages(states * _leading(max(num_inputs, hidden)))
        + 2 * _pages(states * hidden)
        + _pages(cells * _leading(hidden))
    )


def _lstm_forward(args: tuple[Any, ...], out: Any) -> int:
    """Packed weights, the sum of both biases, and one array of gates."""
    num_steps, num_rows, num_inputs = args[0].shape
    hidden = args[2].shape[1]
    width = args[0].element_size()
    gates = _leading(4 * hidden)
    return (
        4 * hidden * width
        + (num_inputs + hidden) * gates * width
        + _pages(num_steps * num_rows * gates * width)
        + 2 * _pages(num_rows * _leading(hidden) * width)
        + 4664
    )


def _lstm_backward(args: tuple[Any, ...], out: Any) -> int:
    """As forward, with gradients of bias and of the last states."""
    num_rows = args[0].shape[1]
    hidden = args[2].shape[1]
    width = args[0].element_size()
    return _lstm_forward(args, out) + (4 * hidden + 2 * num_rows * hidden) * width


def _conv_forward(args: tuple[Any, ...], out: torch.Tensor) -> int:
    """Copies in oneDNN's blocked layout: input and weight first, the output later."""
    image, weight = args[0], args[1]
    packed_weight = _num_bytes(weight)
    if _is_channels_last(image):
        is_dense = args[8] == 1
        return 2 * packed_weight if is_dense else packed_weight
    # Images with few channels are read as they are.
    packed_image = _num_bytes(image) if image.shape[1] >= _BLOCK else 0
    return max(packed_image + packed_weight, _num_bytes(out))


def _conv_backward(args: tuple[Any, ...], out: Any) -> int:
    """Copies for the gradient of the input, then for the gradient of the weight."""
    grad_out, image, weight = (_num_bytes(tensor) for tensor in args[:3])
    wants_image = bool(args[10][0])
    groups = args[9]
    packed_grad = groups * _padded(args[2].shape[0] // groups) * _padded(args[2].shape[1])
    packed_grad *= math.prod(args[2].shape[2:]) * args[2].element_size()
    if _is_channels_last(args[1]) or _is_channels_last(args[0]):
        if groups > 1:
            return packed_grad + weight
        copied = 0 if _is_channels_last(args[0]) else grad_out
        return copied + 3 * weight
    if not wants_image:
        return grad_out + weight
    kept = image
    peak = max(
        grad_out + weight + image,
        2 * image,
        kept + grad_out + image + packed_grad,
        kept + packed_grad + weight,
    )
    return peak - (image + weight)


def _attention_forward(args: tuple[Any, ...], out: Any) -> int:
    """One tile of scores, and its running maximum and sum, per thread.

    Source: cpu_flash_attention in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, torch 2.13.
    """
    query, key = args[0], args[1]
    rows, columns = _tile(query.shape[2], key.shape[2])
    return torch.get_num_threads() * (rows * columns + 2 * rows + rows * query.shape[3]) * 4


def _attention_backward(args: tuple[Any, ...], out: Any) -> int:
    """Two tiles, of scores and of their gradients, per thread. Source: as for forward."""
    rows, columns = _tile(args[1].shape[2], args[2].shape[2])
    return torch.get_num_threads() * 2 * rows * columns * 4


def _tile(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Give the tile that the attention kernel works on."""
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(512, num_keys)


def _leading(extent: int) -> int:
    """Give oneDNN's leading dimension: whole cache lines, but no multiple of 256 entries."""
    padded = -(-extent // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


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
        "convolution": _conv_forward,
        "convolution_backward": _conv_backward,
        "mkldnn_rnn_layer": _lstm_forward,
        "mkldnn_rnn_layer_backward": _lstm_backward,
        "_scaled_dot_product_flash_attention_for_cpu": _attention_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    }
)
