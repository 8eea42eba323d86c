"""Recurrent layers as cuDNN runs them: one operator for all layers, and what it keeps and takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch

from memfit.figures import Certainty
from memfit.kernels.cuda.card import Card
from memfit.kernels.registration import Operator
from memfit.kernels.scratch import Moment, Scratch, highest
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes
from memfit.units import MIB

_aten = torch.ops.aten
_CUDNN = "aten/src/ATen/native/cudnn/RNN.cpp; "
_WEIGHTS_PER_LAYER = 2
_BIASES_PER_LAYER = 2
_KEPT_BY_GRU_CELL = 5
"""What the fused step keeps per element of the state (GRU_WORKSPACE_MULTIPLIER in RNN.cu)."""
_MEASURED = "sizes measured with cuDNN 9.19 on an H200, torch 2.11.0+cu130 (2026-11-26)"
_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""cudnnRNNMode_t, in the order of its enumerators."""
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_KEPT_PER_LAYER = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 5, "gru": 6}
_PRODUCT_BYTES = 8 * MIB
_DROPOUT_HEAD_BYTES = 256
_STATE_PER_THREAD_BYTES = 24
"""What cuDNN's generator keeps of each thread that a card can have in flight."""


def _rnn_scratch(*, input: torch.Tensor, batch_first: bool, **arguments: Any) -> Scratch:
    """Return the workspace, and the copy of the input into time-first order.

    The reserve and the flat weights are outputs of the operator.

    Source: _cudnn_rnn in aten/src/ATen/native/cudnn/RNN.cpp.
    """
    workspace = rnn_workspace(Recurrence.of({"input": input, **arguments}))
    copies = copied_bytes(*_time_first(batch_first, input))
    return Scratch.exact(_CUDNN, copies) + workspace


def _rnn_backward_scratch(
    *, input: torch.Tensor, grad_output: torch.Tensor | None, batch_first: bool, **arguments: Any
) -> Scratch:
    """Return the fuller half of the backward: the input's gradient comes first, then the weights'.

    Each half copies the input into time-first order and takes a workspace of its own; the first
    copies the output's gradient too, and has not asked for the weights' gradients yet. Gradients
    of the last states that nobody gives are zeros.

    Source: _cudnn_rnn_backward in aten/src/ATen/native/cudnn/RNN.cpp.
    """
    workspace = rnn_workspace(Recurrence.of({"input": input, **arguments}))
    data, grad = _time_first(batch_first, input, grad_output)
    gradients = sum(num_bytes(each) for each in arguments["weight"])
    states = ((arguments["hx"], arguments["grad_hy"]), (arguments["cx"], arguments["grad_cy"]))
    zeros = tuple(num_bytes(s) for s, given in states if s is not None and given is None)
    first = (*copied_bytes(data, grad), *zeros, *workspace.blocks)
    second = (*copied_bytes(data), *zeros, *workspace.blocks)
    blocks = highest((Moment(blocks=first, missing_output_bytes=gradients), Moment(blocks=second)))
    return Scratch.between(
        _CUDNN + _MEASURED,
        blocks,
        low_bytes=max(0, sum(blocks) - workspace.num_bytes),
        high_bytes=sum(blocks) - workspace.num_bytes + workspace.high_bytes,
        certainty=Certainty.GUESS,
    )


def _dropout_state(*, dropout: float, train: bool, card: Card) -> int:
    """Return the state of cuDNN's generator, which the first layer with dropout makes for all."""
    return dropout_state_bytes(card) if train and dropout > 0 else 0


def _time_first(batch_first: bool, *arrays: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Turn arrays whose batch comes first."""
    return [
        each.transpose(0, 1) if batch_first and each is not None and each.dim() == 3 else each
        for each in arrays
    ]


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
        if torch.is_autocast_enabled("cuda"):
            rows, hidden, cell, params = _in_half(rows, hidden, cell, params)
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


def _in_half(
    rows: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Sequence[torch.Tensor]]:
    """Cast what autocast casts: to half, whatever its own type, with all weights in one buffer.

    Source: ``_cudnn_rnn_cast_reflatten`` in aten/src/ATen/cudnn/AutocastRNN.cpp.
    """
    half = torch.float16
    if weights[0].dtype in {torch.float32, torch.bfloat16}:
        flat = torch.zeros(sum(each.numel() for each in weights), dtype=half, device=rows.device)
        cast, offset = [], 0
        for weight in weights:
            place = flat.new_empty(0).set_(
                flat.untyped_storage(), offset, weight.shape, weight.stride()
            )
            cast.append(place.copy_(weight))
            offset += weight.numel()
        weights = cast
    return rows.to(half), hidden.to(half), None if cell is None else cell.to(half), weights


def _rnn_fake(*, out: Sequence[Any], batch_first: bool, **arguments: Any) -> tuple[Any, ...]:
    """Return a reserve of the right size, and the output as cuDNN writes it: time first."""
    output, hidden, cell, reserve, weights = out
    reserve_bytes = rnn_reserve_bytes(Recurrence.of(arguments))
    if batch_first and output.dim() == 3:
        output = torch.empty_like(output.transpose(0, 1).contiguous()).transpose(0, 1)
    return output, hidden, cell, reserve.new_empty(reserve_bytes), weights


def _rnn_backward_fake(
    *,
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    batch_first: bool,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    """Return what cuDNN's backward returns: weight gradients are views of one buffer.

    The gradients of the input, time first, and of the states are made asked for or not.
    """
    (data,) = _time_first(batch_first, input)
    assert data is not None
    (grad_input,) = _time_first(batch_first, input.new_empty(data.shape))
    grad_hidden = torch.empty_like(hx)
    grad_cell = None if cx is None else torch.empty_like(cx)
    grads: list[torch.Tensor] = []
    if output_mask[-1]:
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
    # Stretches of steps of equal batch size.
    begins = [step for step in range(len(sizes)) if not step or sizes[step] != sizes[step - 1]]
    for begin, end in list(pairwise([*begins, len(sizes)])):
        rows = (end - begin) * sizes[begin]
        part = data[first_row : first_row + rows]
        place = out[begin:end, : sizes[begin]]
        place.copy_(part.view(place.shape))
        first_row += rows
    lengths = [sum(size > row for size in sizes) for row in range(sizes[0])]
    return (out.transpose(0, 1) if batch_first else out), torch.tensor(lengths)


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
    "_cudnn_rnn": Operator(fake=_rnn_fake, scratch=_rnn_scratch, keeps=_dropout_state),
    "_cudnn_rnn_backward": Operator(fake=_rnn_backward_fake, scratch=_rnn_backward_scratch),
    "lstm_cell": Operator(choice=_lstm_cell),
    "gru_cell": Operator(choice=_gru_cell),
    "_thnn_fused_gru_cell": Operator(fake=_gru_cell_fake),
    "_thnn_fused_gru_cell_backward": Operator(fake=_gru_cell_backward_fake),
    "_pad_packed_sequence": Operator(choice=_pad),
    "_pack_padded_sequence_backward": Operator(choice=_pack_backward),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """The sizes of a stack of recurrent layers.

    cuDNN tells these sizes at run time only. The laws here reproduce the sizes that were measured
    with cuDNN 9.19 on an H200; they were found on a few stacks of layers, so everything is a guess.
    """

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
    def input_bytes(self) -> int:
        """Return the bytes of the input of the lowest layer."""
        return self.num_rows * self.num_inputs * self.width

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
    one's output. Dropout adds a bit for each value between layers. With four layers of 320 units
    and 25,000 rows in fp32 that is 736,000,000 bytes for an LSTM and 864,000,000 for a GRU, which
    is what cuDNN was seen to ask for in 2017 (pytorch issue 2895), and still is. The plain RNN is
    an analogy.
    """
    below = recurrence.num_layers - 1
    arrays = _KEPT_PER_LAYER[recurrence.mode] * recurrence.num_layers + below
    kept = arrays * recurrence.array_bytes
    if recurrence.has_dropout:
        kept += below * recurrence.array_bytes // recurrence.width // 8 + _DROPOUT_HEAD_BYTES
    return kept


def rnn_workspace(recurrence: Recurrence) -> Scratch:
    """Return the workspace of one call.

    The weights turned over, what one layer keeps, the input twice, ``3 gates - 2`` states of one
    time step for each layer and direction, and 8 MiB for each of those. That is the 203,948,544
    bytes (but 512) of two LSTM layers of 1024 units, a batch of 32 and 128 steps, in fp32, and what
    three GRU layers of 512 units in both directions took in fp32 and in half. The lower end is
    what cuDNN took in 2017: weights and states alone.
    """
    states = recurrence.batch_size * recurrence.hidden * recurrence.width
    layers = recurrence.num_layers * recurrence.num_directions
    low = recurrence.weight_bytes + (3 * _GATES[recurrence.mode] - 2) * layers * states
    kept = _KEPT_PER_LAYER[recurrence.mode] * recurrence.array_bytes
    likely = low + kept + 2 * recurrence.input_bytes + layers * _PRODUCT_BYTES
    return Scratch.between(
        _MEASURED,
        (likely,),
        low_bytes=low,
        high_bytes=2 * likely,
        certainty=Certainty.GUESS,
    )


def dropout_state_bytes(card: Card) -> int:
    """Return what cuDNN's generator keeps for good once a layer has drawn its first dropout.

    6,488,064 bytes on an H200 with 132 multiprocessors of 2048 threads; that other cards take as
    much for each thread is an analogy.
    """
    threads = card.likely_multiprocessors * card.threads_per_multiprocessor
    return threads * _STATE_PER_THREAD_BYTES
