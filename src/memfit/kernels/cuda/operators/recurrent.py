"""Recurrent layers as cuDNN runs them: one operator for all layers, and what it keeps and takes.

cuDNN tells these sizes at run time only. The laws here reproduce the sizes that were published
for cuDNN of 2017; newer versions pick other kernels, so everything is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch

from memfit.figures import Certainty
from memfit.kernels.registration import Operator
from memfit.kernels.scratch import Scratch
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes

_aten = torch.ops.aten
_CUDNN = "aten/src/ATen/native/cudnn/RNN.cpp; "
_PUBLISHED_SIZES = "pytorch issue 2895, sizes printed by cuDNN on a P100 (2017-10-04)"
_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""cudnnRNNMode_t, in the order of its enumerators."""
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_KEPT_PER_LAYER = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 5, "gru": 6}
_WEIGHTS_PER_LAYER = 2
_BIASES_PER_LAYER = 2
_KEPT_BY_GRU_CELL = 5
"""What the fused step keeps per element of the state (GRU_WORKSPACE_MULTIPLIER in RNN.cu)."""


# --- What cuDNN keeps and takes ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The sizes of a stack of recurrent layers."""

    mode: str
    """``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    num_layers: int
    num_directions: int
    num_rows: int
    """Rows of the input: time steps times batch, or the rows of a packed sequence."""
    batch_size: int
    num_inputs: int
    hidden: int
    width: int
    """Bytes of an element."""
    has_dropout: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Read the sizes off the arguments of ``_cudnn_rnn`` or of its backward."""
        data = arguments["input"]
        return cls(
            mode=_MODES[arguments["mode"]],
            num_layers=arguments["num_layers"],
            num_directions=2 if arguments["bidirectional"] else 1,
            num_rows=data.numel() // int(data.shape[-1]),
            batch_size=int(arguments["hx"].shape[-2]),
            num_inputs=int(data.shape[-1]),
            hidden=arguments["hidden_size"],
            width=data.element_size(),
            has_dropout=bool(arguments["dropout"]),
        )

    @property
    def array_bytes(self) -> int:
        """Return the bytes of one array of hidden states: rows by hidden units, both directions."""
        return self.num_rows * self.hidden * self.num_directions * self.width

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weight matrices, without biases."""
        outputs = self.hidden * self.num_directions
        inputs = self.num_inputs + (self.num_layers - 1) * outputs
        per_gate = outputs * (inputs + self.num_layers * self.hidden)
        return _GATES[self.mode] * per_gate * self.width


def rnn_reserve_bytes(recurrence: Recurrence) -> int:
    """Return the most likely bytes that cuDNN keeps from forward for backward.

    Per layer and direction, the gates and the cell (LSTM: 4 + 1 arrays of rows by hidden units),
    three gates and three more (GRU), or the state (plain RNN), and between two layers the lower
    one's output. With four layers of 320 units and 25,000 rows in fp32 that is 736,000,000 bytes
    for an LSTM and 864,000,000 for a GRU, which is what cuDNN was seen to ask for. The plain RNN
    is an analogy. Dropout adds an array of the same size between layers.
    """
    below = (recurrence.num_layers - 1) * (2 if recurrence.has_dropout else 1)
    arrays = _KEPT_PER_LAYER[recurrence.mode] * recurrence.num_layers + below
    return arrays * recurrence.array_bytes


def rnn_workspace(recurrence: Recurrence) -> Scratch:
    """Return the workspace of one call: the weights turned over, and states of one time step.

    ``3 gates - 1`` arrays of batch by hidden units per layer reproduce both published sizes
    (17,730,560 bytes for the LSTM, 13,169,920 for the GRU, with a batch of 100), of which the
    batch is inferred. The upper end allows for the gates of all time steps of one layer.
    """
    gates = _GATES[recurrence.mode]
    state = recurrence.batch_size * recurrence.hidden * recurrence.width
    layers = recurrence.num_layers * recurrence.num_directions
    likely = recurrence.weight_bytes + (3 * gates - 1) * layers * state
    return Scratch.between(
        _PUBLISHED_SIZES,
        (likely,),
        low_bytes=0,
        high_bytes=2 * likely + gates * recurrence.array_bytes,
        certainty=Certainty.GUESS,
    )


def _rnn_scratch(*, input: torch.Tensor, batch_first: bool, **arguments: Any) -> Scratch:
    """Return the workspace, and copies into time-first order where the batch comes first.

    The input is copied; in the backward the output and its gradient as well. The reserve and the
    flat weights are outputs of the operator.

    Source: _cudnn_rnn and _cudnn_rnn_backward in aten/src/ATen/native/cudnn/RNN.cpp.
    """
    arrays = [input, arguments.get("output"), arguments.get("grad_output")]
    if batch_first:
        arrays = [
            array.transpose(0, 1) if array is not None and array.dim() == 3 else array
            for array in arrays
        ]
    copies = copied_bytes(*arrays)
    workspace = rnn_workspace(Recurrence.of({"input": input, **arguments}))
    return Scratch.between(
        _CUDNN + _PUBLISHED_SIZES,
        (*copies, *workspace.blocks),
        low_bytes=sum(copies),
        high_bytes=sum(copies) + workspace.high_bytes,
        certainty=Certainty.GUESS,
    )


# --- What CUDA chooses, and fake outputs ---


def _layer(mode: str) -> Operator:
    """Run layers over sequences of one length, or packed ones, as cudnn/RNN.cpp does."""

    def choice(
        *,
        hx: torch.Tensor | Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
        input: torch.Tensor | None = None,
        data: torch.Tensor | None = None,
        batch_sizes: torch.Tensor | None = None,
    ) -> Any:
        rows = data if input is None else input
        assert rows is not None, "the schema has one or the other"
        rows_by_step = [] if batch_sizes is None else batch_sizes.tolist()
        hidden, cell = (hx, None) if isinstance(hx, torch.Tensor) else hx
        hidden_size = int(hidden.shape[2] if cell is None else cell.shape[2])
        proj_size = int(hidden.shape[2]) if hidden.shape[2] != hidden_size else 0
        per_layer = _WEIGHTS_PER_LAYER + (_BIASES_PER_LAYER if has_biases else 0) + bool(proj_size)
        output, last_hidden, last_cell, _, _ = _aten._cudnn_rnn(
            rows,
            list(params),
            per_layer,
            torch.empty(0, dtype=rows.dtype, device=rows.device),
            hidden.contiguous(),
            None if cell is None else cell.contiguous(),
            _MODES.index(mode),
            hidden_size,
            proj_size,
            num_layers,
            batch_first,
            dropout if train else 0.0,
            train,
            bidirectional,
            rows_by_step,
            None,
        )
        return (output, last_hidden) if cell is None else (output, last_hidden, last_cell)

    return Operator(choice=choice)


def _rnn_fake(*, out: Sequence[Any], **arguments: Any) -> tuple[Any, ...]:
    """Put a reserve of the right size in the place of the empty one of torch's fake version."""
    output, hidden, cell, reserve, weights = out
    reserve_bytes = rnn_reserve_bytes(Recurrence.of(arguments))
    return output, hidden, cell, reserve.new_empty(reserve_bytes), weights


def _rnn_backward_fake(
    *,
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Return what cuDNN's backward returns: weight gradients are views of one buffer."""
    grad_input = torch.empty_like(input) if output_mask[0] else None
    grad_hidden = torch.empty_like(hx) if output_mask[1] else None
    grad_cell = torch.empty_like(cx) if cx is not None and output_mask[2] else None
    grads: list[torch.Tensor] = []
    if output_mask[3]:
        sizes = [each.numel() for each in weight]
        parts = input.new_empty(sum(sizes)).split(sizes)
        grads = [part.view(each.shape) for part, each in zip(parts, weight, strict=True)]
    return grad_input, grad_hidden, grad_cell, grads


def _lstm_cell(
    *,
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None,
    b_hh: torch.Tensor | None,
) -> Any:
    """Take the fused kernel for one step, as ``lstm_cell`` in aten/src/ATen/native/RNN.cpp does."""
    hidden, cell = hx
    gates = _aten._thnn_fused_lstm_cell(input @ w_ih.t(), hidden @ w_hh.t(), cell, b_ih, b_hh)
    return gates[0], gates[1]


def _gru_cell(
    *,
    input: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None,
    b_hh: torch.Tensor | None,
) -> Any:
    """Take the fused kernel for one step, as ``gru_cell`` in aten/src/ATen/native/RNN.cpp does."""
    return _aten._thnn_fused_gru_cell(input @ w_ih.t(), hx @ w_hh.t(), hx, b_ih, b_hh)[0]


def _gru_cell_fake(*, hx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the fused GRU step returns: the new state and what its backward needs.

    Source: ``_thnn_fused_gru_cell_cuda`` in aten/src/ATen/native/cuda/RNN.cu.
    """
    kept = hx.new_empty(hx.shape[0], hx.shape[1] * _KEPT_BY_GRU_CELL)
    return torch.empty_like(hx), kept


def _gru_cell_backward_fake(
    *, grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[Any, ...]:
    """Return the gradients of the fused GRU step: of both gates, the state and both biases."""
    num_gates = workspace.shape[1] // _KEPT_BY_GRU_CELL * _GATES["gru"]
    gates = [workspace.new_empty(workspace.shape[0], num_gates) for _ in range(2)]
    biases = [workspace.new_empty(num_gates) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad_hy), *biases)


# --- Packed sequences ---


def _pad(
    *,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay packed sequences out as ``pad_packed_sequence`` does.

    Source: ``_pad_packed_sequence`` in aten/src/ATen/native/PackedSequence.cpp.
    """
    sizes = batch_sizes.tolist()
    length = max(total_length, len(sizes))
    shape = (length, sizes[0], *data.shape[1:])
    out = torch.full(shape, padding_value, dtype=data.dtype, device=data.device)
    first_row = 0
    for begin, end in _runs(sizes):
        rows = (end - begin) * sizes[begin]
        part = data[first_row : first_row + rows]
        place = out[begin:end, : sizes[begin]]
        place.copy_(part.view(place.shape))
        first_row += rows
    lengths = [sum(size > row for size in sizes) for row in range(sizes[0])]
    return (out.transpose(0, 1) if batch_first else out), torch.tensor(lengths)


def _runs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Split steps into stretches of equal batch size, as half-open ranges."""
    begins = [step for step in range(len(sizes)) if not step or sizes[step] != sizes[step - 1]]
    return list(pairwise([*begins, len(sizes)]))


def _pack_backward(
    *, grad: torch.Tensor, input_size: Sequence[int], batch_first: bool
) -> torch.Tensor:
    """Return the gradient of the padded sequences; its rows are copied into it.

    Source: ``_pack_padded_sequence_backward`` in aten/src/ATen/native/PackedSequence.cpp.
    """
    first, second, *rest = input_size
    out = grad.new_zeros([second, first, *rest] if batch_first else list(input_size))
    return out.transpose(0, 1) if batch_first else out


def _align_backward(*, log_alpha: torch.Tensor) -> Scratch:
    """Return the table of the CTC loss's backward variable, which is like the forward one.

    Source: ``ctc_loss_backward_gpu_template`` in aten/src/ATen/native/cuda/LossCTC.cu.
    """
    return Scratch.exact("aten/src/ATen/native/cuda/LossCTC.cu", (num_bytes(log_alpha),))


OPERATORS: Mapping[str, Operator] = {
    "_ctc_loss_backward": Operator(scratch=_align_backward),
    **{f"{mode}.{kind}": _layer(mode) for mode in _MODES for kind in ("input", "data")},
    "_cudnn_rnn": Operator(fake=_rnn_fake, scratch=_rnn_scratch),
    "_cudnn_rnn_backward": Operator(fake=_rnn_backward_fake, scratch=_rnn_scratch),
    "lstm_cell": Operator(choice=_lstm_cell),
    "gru_cell": Operator(choice=_gru_cell),
    "_thnn_fused_gru_cell": Operator(fake=_gru_cell_fake),
    "_thnn_fused_gru_cell_backward": Operator(fake=_gru_cell_backward_fake),
    "_pad_packed_sequence": Operator(choice=_pad),
    "_pack_padded_sequence_backward": Operator(choice=_pack_backward),
}
