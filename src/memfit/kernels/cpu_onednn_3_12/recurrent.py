"""LSTMs as oneDNN runs them on the CPU: what forward keeps for backward, and what both take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from memfit.kernels.registration import Operator
from memfit.kernels.rounding import round_up
from memfit.kernels.tensor_bytes import copied_bytes
from memfit.kernels.tensor_bytes import num_bytes as bytes_of_tensor

_PAGE_BYTES = 4096
_FP32 = 4
_JIT_BYTES = 4664
_HALF_JIT_BYTES = 5176
_HALF_BACKWARD_BYTES = 2048
_PAIRS = 32


@dataclass(frozen=True, slots=True)
class _Lstm:
    """The sizes of one LSTM layer; ``width`` is the bytes of an element of its input."""

    num_steps: int
    num_rows: int
    num_inputs: int
    hidden: int
    width: int

    @classmethod
    def of(cls, input: torch.Tensor, hidden_size: int) -> Self:
        """Read the sizes off an input of steps, rows and features."""
        num_steps, num_rows, num_inputs = input.shape
        return cls(num_steps, num_rows, num_inputs, hidden_size, input.element_size())

    @property
    def packed_weight_bytes(self) -> int:
        """Return the bytes of both weights in oneDNN's layout, in forward."""
        if self.width == _FP32:
            return self.wide_weight_bytes
        columns = 4 * round_up(self.hidden, _PAIRS)
        return (round_up(self.num_inputs, 2) + round_up(self.hidden, 2)) * columns * self.width

    @property
    def wide_weight_bytes(self) -> int:
        """Return the bytes of both weights, or of their gradients, in fp32."""
        return (self.num_inputs + self.hidden) * _leading(4 * self.hidden, _FP32) * _FP32

    @property
    def turned_weight_bytes(self) -> int:
        """Return the bytes of both weights as backward reads them; in fp32 whole lines do as is."""
        columns = 4 * round_up(self.hidden, _FP32 // self.width) * self.width
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


def _forward(*, input: torch.Tensor, hidden_size: int) -> int:
    """Packed weights, the sum of both biases, and the gates."""
    lstm = _Lstm.of(input, hidden_size)
    bias = 4 * lstm.hidden * lstm.width
    return bias + lstm.packed_weight_bytes + lstm.gate_scratch_bytes(is_backward=False)


def _backward(*, input: torch.Tensor, hidden_size: int, grad_output: torch.Tensor) -> int:
    """As forward, with gradients of last states and turned weights; in bf16 fp32 copies too."""
    lstm = _Lstm.of(input, hidden_size)
    gates, states = 4 * lstm.hidden, 2 * lstm.num_rows * lstm.hidden
    weights = lstm.turned_weight_bytes + lstm.wide_weight_bytes
    num_bytes = (gates + states) * lstm.width + weights
    num_bytes += lstm.gate_scratch_bytes(is_backward=True)
    num_bytes += sum(copied_bytes(grad_output))
    if lstm.width == _FP32:
        return num_bytes
    outputs = lstm.num_steps * lstm.num_rows * lstm.hidden
    return num_bytes + (outputs + states) * _FP32 + _HALF_BACKWARD_BYTES


def _fake(*, input: torch.Tensor, hidden_size: int, out: Sequence[Any]) -> tuple[Any, ...]:
    """Give forward the workspace that it keeps, which torch's own fake version leaves empty."""
    # Gates, two arrays of states and one of outputs in the input's type, one padded and two plain
    # arrays of states in fp32, each on whole pages (``set_workspace_sizes`` in
    # src/cpu/rnn/rnn_utils.hpp of oneDNN; fitted to the page on seventeen shapes).
    lstm = _Lstm.of(input, hidden_size)
    cells = lstm.num_steps * lstm.num_rows
    states = 2 * (lstm.num_steps + 1) * lstm.num_rows
    widest = max(lstm.num_inputs, lstm.hidden)
    num_bytes = (
        _pages(cells * _leading(4 * lstm.hidden, lstm.width) * lstm.width)
        + 2 * _pages(states * _leading(widest, lstm.width) * lstm.width)
        + _pages(states * _leading(widest, _FP32) * _FP32)
        + 2 * _pages(states * lstm.hidden * _FP32)
        + _pages(cells * _leading(lstm.hidden, lstm.width) * lstm.width)
    )
    return *out[:3], torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _leading(extent: int, width: int) -> int:
    """Return oneDNN's leading dimension: whole cache lines, but no multiple of 256 entries."""
    line = 64 // width
    extent = round_up(extent, line)
    return extent + line if extent % 256 == 0 else extent


def _pages(num_bytes: int) -> int:
    return round_up(num_bytes, _PAGE_BYTES)


def _align_backward(*, log_alpha: torch.Tensor) -> int:
    """Return the table of the CTC loss's backward variable, which is like the forward one.

    Source: ``ctc_loss_backward_cpu_template`` in aten/src/ATen/native/LossCTC.cpp.
    """
    return bytes_of_tensor(log_alpha)


OPERATORS: Mapping[str, Operator] = {
    "_ctc_loss_backward": Operator(scratch=_align_backward),
    "mkldnn_rnn_layer": Operator(fake=_fake, scratch=_forward),
    "mkldnn_rnn_layer_backward": Operator(scratch=_backward),
}
