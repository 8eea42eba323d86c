"""Recurrent layers as cuDNN runs them: one operator for all layers, and what it keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memfit.trace.cuda.cudnn_recurrence import Recurrence, rnn_reserve_bytes

_aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cudnnRNNMode_t, in the order of its enumerators."""
_WEIGHTS_PER_LAYER = 2
_BIASES_PER_LAYER = 2


def recurrent_operators() -> dict[str, Callable[..., Any]]:
    """Give the replacements of torch's recurrent operators, by name."""
    operators: dict[str, Callable[..., Any]] = {}
    for name, mode in _MODES.items():
        run = _lstm if name == "lstm" else functools.partial(_one_state, mode)
        operators[f"{name}.input"] = run
        packed = _packed_lstm if name == "lstm" else functools.partial(_packed_one_state, mode)
        operators[f"{name}.data"] = packed
    return operators


def _lstm(
    data: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    return _run(
        data,
        list(states),
        list(weights),
        (),
        mode=_MODES["lstm"],
        has_biases=has_biases,
        num_layers=num_layers,
        dropout=dropout,
        train=train,
        bidirectional=bidirectional,
        batch_first=batch_first,
    )


def _packed_lstm(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    states: Sequence[torch.Tensor],
    *rest: Any,
) -> Any:
    return _run_packed(_MODES["lstm"], data, batch_sizes, list(states), *rest)


def _one_state(mode: int, data: torch.Tensor, state: torch.Tensor, *rest: Any) -> Any:
    weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
    return _run(
        data,
        [state],
        list(weights),
        (),
        mode=mode,
        has_biases=has_biases,
        num_layers=num_layers,
        dropout=dropout,
        train=train,
        bidirectional=bidirectional,
        batch_first=batch_first,
    )


def _packed_one_state(
    mode: int, data: torch.Tensor, batch_sizes: torch.Tensor, state: torch.Tensor, *rest: Any
) -> Any:
    return _run_packed(mode, data, batch_sizes, [state], *rest)


def _run_packed(
    mode: int,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    states: list[torch.Tensor],
    *rest: Any,
) -> Any:
    weights, has_biases, num_layers, dropout, train, bidirectional = rest
    return _run(
        data,
        states,
        list(weights),
        tuple(batch_sizes.tolist()),
        mode=mode,
        has_biases=has_biases,
        num_layers=num_layers,
        dropout=dropout,
        train=train,
        bidirectional=bidirectional,
        batch_first=False,
    )


def _run(
    data: torch.Tensor,
    states: list[torch.Tensor],
    weights: list[torch.Tensor],
    batch_sizes: tuple[int, ...],
    *,
    mode: int,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Call cuDNN's operator as aten/src/ATen/native/cudnn/RNN.cpp does."""
    hidden = states[0]
    cell = states[1] if len(states) > 1 else None
    hidden_size = int(cell.shape[2] if cell is not None else hidden.shape[2])
    proj_size = int(hidden.shape[2]) if hidden.shape[2] != hidden_size else 0
    per_layer = _WEIGHTS_PER_LAYER + (_BIASES_PER_LAYER if has_biases else 0) + bool(proj_size)
    flat = torch.empty(0, dtype=data.dtype, device=data.device)
    output, last_hidden, last_cell, _, _ = _aten._cudnn_rnn(
        data,
        weights,
        per_layer,
        flat,
        hidden.contiguous(),
        None if cell is None else cell.contiguous(),
        mode,
        hidden_size,
        proj_size,
        num_layers,
        batch_first,
        dropout if train else 0.0,
        train,
        bidirectional,
        list(batch_sizes),
        None,
    )
    return (output, last_hidden) if cell is None else (output, last_hidden, last_cell)


def fake_backward(args: Sequence[Any]) -> tuple[Any, ...]:
    """Give what cuDNN's backward returns: weight gradients are views of one buffer."""
    data, weights, hidden, cell = args[0], args[1], args[4], args[5]
    mask = args[-1]
    grad_data = torch.empty_like(data) if mask[0] else None
    grad_hidden = torch.empty_like(hidden) if mask[1] else None
    grad_cell = torch.empty_like(cell) if cell is not None and mask[2] else None
    grads: list[torch.Tensor] = []
    if mask[3]:
        flat = data.new_empty(sum(weight.numel() for weight in weights))
        begin = 0
        for weight in weights:
            grads.append(flat[begin : begin + weight.numel()].view(weight.shape))
            begin += weight.numel()
    return grad_data, grad_hidden, grad_cell, grads


def with_reserve(out: Sequence[Any], reserve_bytes: int) -> tuple[Any, ...]:
    """Put a reserve of the right size in the place of the empty one of torch's fake version."""
    output, hidden, cell, reserve, weights = out
    reserve = reserve.new_empty(reserve_bytes)
    return output, hidden, cell, reserve, weights


def reserve_bytes_of(args: Sequence[Any]) -> int:
    """Give the bytes that cuDNN keeps from forward for backward."""
    return rnn_reserve_bytes(Recurrence.of(tuple(args)))


def pack(
    data: torch.Tensor, lengths: Sequence[int], *, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay padded sequences out as ``pack_padded_sequence`` does, knowing their lengths.

    Args:
        data: (time, batch, ...), or (batch, time, ...) with ``batch_first``.
        lengths: of the sequences, longest first.
    """
    batch_sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    rows = (data.transpose(0, 1) if batch_first else data).reshape(-1, *data.shape[2:])
    return rows[: sum(lengths)].clone(), torch.tensor(batch_sizes)
