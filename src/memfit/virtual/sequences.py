"""Runs what takes sequences of different lengths: its C++ code reads the lengths.

A fake tensor has no values to read there; those that are known are handed over as numbers. The
operators of recurrent layers are those of ``PackedLayer``, ``ReversedPackedLayer`` and the cells in
aten/src/ATen/native/RNN.cpp (torch 2.13), in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.modules import rnn as layers
from torch.utils._mode_utils import no_dispatch

from memfit.virtual.cuda.placement import is_on_card
from memfit.virtual.known_values import value_of

State = tuple[torch.Tensor, ...]
Cell = Callable[[torch.Tensor, State, "_Weights"], State]
_PLACE_OF_SIZES = 1
_PLACE_OF_WEIGHTS = 3  # without batch sizes they come one place earlier
_MEAN = 1


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of one layer in one direction."""

    w_ih: torch.Tensor
    w_hh: torch.Tensor
    b_ih: torch.Tensor | None = None
    b_hh: torch.Tensor | None = None
    w_hr: torch.Tensor | None = None

    def from_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the product with a hidden state."""
        return F.linear(hidden, self.w_hh, self.b_hh)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What a recurrent layer is like besides its weights."""

    num_layers: int
    dropout: float
    is_training: bool
    is_bidirectional: bool


def sequences() -> Iterator[Any]:
    """Yield what replaces packed recurrent layers of the CPU, padding, and the CTC loss."""
    yield patch.object(torch, "ctc_loss", _with_lengths(torch.ctc_loss))
    cells: Mapping[str, Cell] = {
        "lstm": _lstm_cell,
        "gru": _gru_cell,
        "rnn_tanh": partial(_simple_cell, torch.tanh),
        "rnn_relu": partial(_simple_cell, torch.relu),
    }
    functions: Any = torch._VF
    simple = {}
    for name, cell in cells.items():
        replaced = _packed_or(getattr(functions, name), cell)
        yield patch.object(functions, name, replaced, create=True)
        simple[name.upper()] = replaced
    pad = functions._pad_packed_sequence
    yield patch.object(functions, "_pad_packed_sequence", partial(_pad, pad), create=True)
    known: Any = layers
    names = {key: simple[key] for key in known._rnn_impls}
    yield patch.dict(known._rnn_impls, names)


def _packed_or(real: Callable[..., Any], cell: Cell) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        is_packed = len(args) > _PLACE_OF_WEIGHTS and isinstance(
            args[_PLACE_OF_WEIGHTS], (list, tuple)
        )
        batch_sizes = _sizes(args[_PLACE_OF_SIZES]) if is_packed else None
        if batch_sizes is None or is_on_card(args[0]):
            return real(*args, **kwargs)
        return _run(cell, batch_sizes, args)

    return run


def _with_lengths(real: Callable[..., Any]) -> Callable[..., Any]:
    """Hand lengths over as numbers, which is what torch makes of them."""

    def ctc_loss(  # noqa: PLR0917 - torch's own signature
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = _MEAN,
        zero_infinity: bool = False,
    ) -> Any:
        given = (input_lengths, target_lengths)
        lengths = [_sizes(each) if isinstance(each, torch.Tensor) else each for each in given]
        if not isinstance(log_probs, FakeTensor) or lengths[0] is None or lengths[1] is None:
            return real(log_probs, targets, *given, blank, reduction, zero_infinity)
        is_batched = log_probs.dim() == 3
        batched = log_probs if is_batched else log_probs.unsqueeze(1)
        targets = targets.to(batched.device, torch.long)
        of_inputs, of_targets = cast(list[int], lengths[0]), cast(list[int], lengths[1])
        losses = torch._ctc_loss(batched, targets, of_inputs, of_targets, blank, zero_infinity)[0]
        return _reduced(losses, of_targets, reduction, zero_infinity, is_batched)

    return ctc_loss


def _reduced(
    losses: torch.Tensor,
    target_lengths: Sequence[int],
    reduction: int,
    zero_infinity: bool,
    is_batched: bool,
) -> torch.Tensor:
    """Reduce CTC losses as ``ctc_loss_impl`` in aten/src/ATen/native/LossCTC.cpp does."""
    if zero_infinity:
        losses = torch.where(losses == float("inf"), losses.new_zeros(()), losses)
    if reduction == _MEAN:
        lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
        return (losses / lengths.clamp_min(1)).mean()
    if reduction:
        return losses.sum()
    return losses if is_batched else losses.squeeze(0)


def _sizes(tensor: torch.Tensor) -> list[int] | None:
    """Return batch sizes where they are known."""
    value = value_of(tensor)
    if value is None:
        return None
    with no_dispatch():
        return [int(each) for each in value]


def _pad(  # noqa: PLR0917 - torch's own signature
    real: Callable[..., Any],
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    batch_first: bool,
    padding_value: float,
    total_length: int,
) -> Any:
    """Lay a packed sequence out as ``_pad_packed_sequence`` in PackedSequence.cpp does."""
    sizes = _sizes(batch_sizes) if isinstance(data, FakeTensor) else None
    if sizes is None:
        return real(data, batch_sizes, batch_first, padding_value, total_length)
    num_steps = max(len(sizes), total_length)
    shape = (num_steps, sizes[0], *data.shape[1:])
    output = torch.full(shape, padding_value, dtype=data.dtype, device=data.device)
    offset = start = 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or sizes[end] != sizes[start]:
            size, num = sizes[start], end - start
            part = data.narrow(0, offset, size * num).view(num, size, *data.shape[1:])
            output.narrow(0, start, num).narrow(1, 0, size).copy_(part)
            offset, start = offset + size * num, end
    lengths = [sum(size > row for size in sizes) for row in range(sizes[0])]
    return (output.transpose(0, 1) if batch_first else output), torch.tensor(lengths)


def _run(cell: Cell, batch_sizes: Sequence[int], args: Sequence[Any]) -> Any:
    data, _, hx, flat, has_biases, num_layers, dropout, is_training, is_bidirectional = args
    layout = _Layout(
        num_layers=num_layers,
        dropout=dropout,
        is_training=is_training,
        is_bidirectional=is_bidirectional,
    )
    states = tuple(hx) if isinstance(hx, (list, tuple)) else (hx,)
    num_directions = 2 if is_bidirectional else 1
    per_direction = len(flat) // (num_layers * num_directions)
    weights = [
        _weights(flat[start : start + per_direction], has_biases=has_biases)
        for start in range(0, len(flat), per_direction)
    ]
    split = list(zip(*(each.unbind(0) for each in states), strict=True))
    data, finals = _stack(cell, data, batch_sizes, (split, weights, layout))
    return (data, *(torch.stack(list(each), 0) for each in zip(*finals, strict=True)))


def _weights(flat: Sequence[torch.Tensor], *, has_biases: bool) -> _Weights:
    if has_biases:
        return _Weights(*flat)
    return _Weights(flat[0], flat[1], w_hr=flat[2] if len(flat) > 2 else None)


def _stack(
    cell: Cell,
    data: torch.Tensor,
    batch_sizes: Sequence[int],
    parts: tuple[Sequence[State], Sequence[_Weights], _Layout],
) -> tuple[torch.Tensor, list[State]]:
    """Run layer after layer; return the last one's outputs and all final states."""
    states, weights, layout = parts
    finals: list[State] = []
    for number in range(layout.num_layers):
        if layout.is_bidirectional:
            at = 2 * number
            ahead, end = _forward(cell, data, batch_sizes, states[at], weights[at])
            back, start = _backward(cell, data, batch_sizes, states[at + 1], weights[at + 1])
            data = torch.cat([ahead, back], -1)
            del ahead, back  # as torch gives both back before the next layer
            finals += [end, start]
        else:
            data, end = _forward(cell, data, batch_sizes, states[number], weights[number])
            finals.append(end)
        if layout.dropout and layout.is_training and number < layout.num_layers - 1:
            data = F.dropout(data, layout.dropout)
    return data, finals


def _forward(
    cell: Cell,
    data: torch.Tensor,
    batch_sizes: Sequence[int],
    state: State,
    weights: _Weights,
) -> tuple[torch.Tensor, State]:
    inputs = F.linear(data, weights.w_ih, weights.b_ih)
    outputs, ended = [], []
    offset, last = 0, batch_sizes[0]
    for size in batch_sizes:
        step = inputs.narrow(0, offset, size)
        offset += size
        if size < last:
            ended.append(tuple(each.narrow(0, size, last - size) for each in state))
            state = tuple(each.narrow(0, 0, size) for each in state)
        last = size
        state = cell(step, state, weights)
        outputs.append(state[0])
    ended.append(state)
    ended.reverse()
    return torch.cat(outputs, 0), tuple(
        torch.cat(list(each), 0) for each in zip(*ended, strict=True)
    )


def _backward(
    cell: Cell,
    data: torch.Tensor,
    batch_sizes: Sequence[int],
    initial: State,
    weights: _Weights,
) -> tuple[torch.Tensor, State]:
    inputs = F.linear(data, weights.w_ih, weights.b_ih)
    outputs = []
    offset, last = int(data.shape[0]), batch_sizes[-1]
    state = tuple(each.narrow(0, 0, last) for each in initial)
    for size in reversed(batch_sizes):
        if size > last:
            added = [each.narrow(0, last, size - last) for each in initial]
            state = tuple(torch.cat(pair, 0) for pair in zip(state, added, strict=True))
        step = inputs.narrow(0, offset - size, size)
        offset -= size
        last = size
        state = cell(step, state, weights)
        outputs.append(state[0])
    outputs.reverse()
    return torch.cat(outputs, 0), state


def _lstm_cell(step: torch.Tensor, state: State, weights: _Weights) -> State:
    gates = weights.from_hidden(state[0]).add_(step)
    chunks = gates.unsafe_chunk(4, 1)
    enters, stays = chunks[0].sigmoid_(), chunks[1].sigmoid_()
    content, leaves = chunks[2].tanh_(), chunks[3].sigmoid_()
    memory = (stays * state[1]).add_(enters * content)
    hidden = leaves * memory.tanh()
    return (hidden if weights.w_hr is None else F.linear(hidden, weights.w_hr)), memory


def _gru_cell(step: torch.Tensor, state: State, weights: _Weights) -> State:
    inputs = step.unsafe_chunk(3, 1)
    chunks = weights.from_hidden(state[0]).unsafe_chunk(3, 1)
    resets = chunks[0].add_(inputs[0]).sigmoid_()
    keeps = chunks[1].add_(inputs[1]).sigmoid_()
    content = inputs[2].add(chunks[2].mul_(resets)).tanh_()
    return ((state[0] - content).mul_(keeps).add_(content),)


def _simple_cell(
    bend: Callable[[torch.Tensor], torch.Tensor],
    step: torch.Tensor,
    state: State,
    weights: _Weights,
) -> State:
    return (bend(weights.from_hidden(state[0]).add_(step)),)
