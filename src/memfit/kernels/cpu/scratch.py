"""Memory that CPU kernels take and give back inside one operator, which dispatch does not see.

The rules give bytes on top of the operator's outputs. They were read off the allocator's events
(torch 2.13.0+cpu, oneDNN 3.12, AVX-512, 2026-11-21) and agree with them to the byte for attention,
for LSTMs in fp32 and for nearly all convolutions in fp32; below fp32 they lie a little above them.
oneDNN lays data out in blocks of 16 channels; processors without AVX-512 use 8, which these rules
don't follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from memfit.kernels.cpu.convolution_scratch import convolution_backward_bytes, convolution_bytes
from memfit.kernels.cpu.convolution_shape import padded
from memfit.kernels.cpu.copying_scratch import copying_bytes
from memfit.kernels.cpu.elementwise_scratch import elementwise_bytes
from memfit.kernels.cpu.optimizer_scratch import eight_bit_update, thirty_two_bit_update

_PAGE_BYTES = 4096
_FP32 = 4
_JIT_BYTES = 4664
_HALF_JIT_BYTES = 5176
_HALF_BACKWARD_BYTES = 2048
_PAIRS = 32
_DEEP = 512
_PANEL_BYTES = 82_752
_SMALL_PANEL_BYTES = 24_576
_DEEP_PANEL_BYTES = 131_904
_TURNED_PANEL_BYTES = 468_096
_TILE_BYTES = 66_176


def scratch_bytes(operator: str, args: tuple[Any, ...], out: Any) -> int:
    """Return the bytes that a CPU kernel takes besides its outputs; 0 where no rule is known."""
    rule = _RULES.get(operator)
    if rule is not None:
        return rule(args, out)
    return elementwise_bytes(operator, args, out) + copying_bytes(operator, args, out)


def lstm_workspace_bytes(args: tuple[Any, ...]) -> int:
    """Return the bytes that oneDNN's LSTM keeps from forward for backward.

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
        """Return the bytes of both weights in oneDNN's layout, in forward."""
        if self.width == _FP32:
            return self.wide_weight_bytes
        columns = 4 * padded(self.hidden, _PAIRS)
        return (padded(self.num_inputs, 2) + padded(self.hidden, 2)) * columns * self.width

    @property
    def wide_weight_bytes(self) -> int:
        """Return the bytes of both weights, or of their gradients, in fp32."""
        return (self.num_inputs + self.hidden) * _leading(4 * self.hidden, _FP32) * _FP32

    @property
    def turned_weight_bytes(self) -> int:
        """Return the bytes of both weights as backward reads them; in fp32 whole lines do as is."""
        columns = 4 * padded(self.hidden, _FP32 // self.width) * self.width
        rows = (self.num_inputs, self.hidden)
        leading = [_leading(each, self.width) for each in rows]
        if self.width == _FP32:
            leading = [new for new, old in zip(leading, rows, strict=True) if new != old]
        return sum(leading) * columns

    def gate_scratch_bytes(self, *, is_backward: bool) -> int:
        """Return the bytes of the gates: of all steps in fp32, of one step in bf16."""
        is_in_fp32 = self.width == _FP32
        is_merged = is_in_fp32 or (self.num_rows == 1 and not is_backward)
        num_steps = self.num_steps if is_merged else 1
        gates = num_steps * self.num_rows * _leading(4 * self.hidden, _FP32) * _FP32
        states = self.num_rows * _leading(self.hidden, _FP32) * _FP32
        return _pages(gates) + 2 * _pages(states) + (_JIT_BYTES if is_in_fp32 else _HALF_JIT_BYTES)


def _lstm_forward(args: tuple[Any, ...], _out: Any) -> int:
    """Packed weights, the sum of both biases, and the gates."""
    lstm = _Lstm.of(args)
    bias = 4 * lstm.hidden * lstm.width
    return bias + lstm.packed_weight_bytes + lstm.gate_scratch_bytes(is_backward=False)


def _lstm_backward(args: tuple[Any, ...], _out: Any) -> int:
    """As forward, with gradients of last states and turned weights; in bf16 fp32 copies too."""
    lstm = _Lstm.of(args)
    gates, states = 4 * lstm.hidden, 2 * lstm.num_rows * lstm.hidden
    weights = lstm.turned_weight_bytes + lstm.wide_weight_bytes
    num_bytes = (gates + states) * lstm.width + weights
    num_bytes += lstm.gate_scratch_bytes(is_backward=True)
    grad_out = args[10]
    if not grad_out.is_contiguous():
        num_bytes += grad_out.numel() * grad_out.element_size()
    if lstm.width == _FP32:
        return num_bytes
    outputs = lstm.num_steps * lstm.num_rows * lstm.hidden
    return num_bytes + (outputs + states) * _FP32 + _HALF_BACKWARD_BYTES


def _conv_backward(args: tuple[Any, ...], _out: Any) -> int:
    return convolution_backward_bytes(args)


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
    per_thread = (rows * columns + 2 * rows + rows * int(query.shape[3])) * _FP32
    if query.element_size() < _FP32:
        per_thread += rows * columns * query.element_size()  # the scores again, to multiply with
    return torch.get_num_threads() * per_thread


def _attention_backward(args: tuple[Any, ...], _out: Any) -> int:
    """Two tiles, of scores and of their gradients, per thread, and a dense copy of the gradient.

    Source: as for forward; the gradient is made contiguous with tokens before heads.
    """
    rows, columns = _tile(args[1].shape[2], args[2].shape[2])
    gradient = args[0].transpose(1, 2)
    copied = 0 if gradient.is_contiguous() else gradient.numel() * gradient.element_size()
    per_thread = 2 * rows * columns * _FP32
    if args[1].element_size() < _FP32:
        per_thread += 2 * rows * columns * args[1].element_size() + _SMALL_PANEL_BYTES
    return torch.get_num_threads() * per_thread + int(copied)


def _tile(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Return the tile that the attention kernel works on."""
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(512, num_keys)


def _leading(extent: int, width: int) -> int:
    """Return oneDNN's leading dimension: whole cache lines, but no multiple of 256 entries."""
    line = 64 // width
    padded = -(-extent // line) * line
    return padded + line if padded % 256 == 0 else padded


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


_RULES: Mapping[str, Callable[[tuple[Any, ...], Any], int]] = MappingProxyType(
    {
        "addmm": _product,
        "mm": _product,
        "convolution": convolution_bytes,
        "convolution_backward": _conv_backward,
        "mkldnn_rnn_layer": _lstm_forward,
        "mkldnn_rnn_layer_backward": _lstm_backward,
        "_scaled_dot_product_flash_attention_for_cpu": _attention_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "bitsandbytes.optimizer_update_8bit_blockwise": eight_bit_update,
        "bitsandbytes.optimizer_update_32bit": thirty_two_bit_update,
    }
)
