"""Recurrent layers as cuDNN runs them: one operator for all layers, and what it keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from memfit.kernels.cuda.cudnn_recurrence import Recurrence, rnn_reserve_bytes

_aten = torch.ops.aten
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cudnnRNNMode_t, in the order of its enumerators."""
_WEIGHTS_PER_LAYER = 2
_BIASES_PER_LAYER = 2
_GATES_OF_GRU = 3
_KEPT_BY_GRU_CELL = 5
"""What the fused step keeps per element of the state (GRU_WORKSPACE_MULTIPLIER in RNN.cu)."""


def recurrent_operators() -> dict[str, Callable[..., Any]]:
    """Return the replacements of torch's recurrent operators, by name."""
    operators: dict[str, Callable[..., Any]] = {}
    for name, mode in _MODES.items():
        operators[f"{name}.input"] = functools.partial(_padded, mode)
        operators[f"{name}.data"] = functools.partial(_packed, mode)
    operators["lstm_cell"] = _lstm_cell
    operators["gru_cell"] = _gru_cell
    operators["_pad_packed_sequence"] = _pad
    operators["_pack_padded_sequence_backward"] = _pack_backward
    return operators


def _lstm_cell(
    data: torch.Tensor,
    states: Sequence[torch.Tensor],
    *weights: torch.Tensor | None,
) -> Any:
    """Take the fused kernel for one step, as ``lstm_cell`` in aten/src/ATen/native/RNN.cpp does."""
    of_data, of_hidden, bias_data, bias_hidden = _cell_weights(weights)
    hidden, cell = states
    gates = _aten._thnn_fused_lstm_cell(
        data @ of_data.t(), hidden @ of_hidden.t(), cell, bias_data, bias_hidden
    )
    return gates[0], gates[1]


def _gru_cell(data: torch.Tensor, hidden: torch.Tensor, *weights: torch.Tensor | None) -> Any:
    """Take the fused kernel for one step, as ``gru_cell`` in aten/src/ATen/native/RNN.cpp does."""
    of_data, of_hidden, bias_data, bias_hidden = _cell_weights(weights)
    return _aten._thnn_fused_gru_cell(
        data @ of_data.t(), hidden @ of_hidden.t(), hidden, bias_data, bias_hidden
    )[0]


def _cell_weights(weights: Sequence[torch.Tensor | None]) -> tuple[Any, Any, Any, Any]:
    """Return a cell's two weights and two biases; biases may be left out."""
    of_data, of_hidden, *biases = weights
    bias_data, bias_hidden = (*biases, None, None)[:2]
    return of_data, of_hidden, bias_data, bias_hidden


def _padded(mode: int, data: torch.Tensor, states: Any, *rest: Any) -> Any:
    """Run a layer over sequences of one length."""
    weights, has_biases, num_layers, dropout, train, bidirectional, batch_first = rest
    return _run(
        data,
        _listed(states),
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


def _packed(
    mode: int, data: torch.Tensor, batch_sizes: torch.Tensor, states: Any, *rest: Any
) -> Any:
    """Run a layer over packed sequences."""
    weights, has_biases, num_layers, dropout, train, bidirectional = rest
    return _run(
        data,
        _listed(states),
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


def _listed(states: Any) -> list[torch.Tensor]:
    """List the states: LSTMs have two, the others one."""
    return [states] if isinstance(states, torch.Tensor) else list(states)


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
    """Return what cuDNN's backward returns: weight gradients are views of one buffer."""
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
    """Return the bytes that cuDNN keeps from forward for backward."""
    return rnn_reserve_bytes(Recurrence.of(tuple(args)))


def fake_gru_cell(args: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the fused GRU step returns: the new state and what its backward needs.

    Source: ``_thnn_fused_gru_cell_cuda`` in aten/src/ATen/native/cuda/RNN.cu.
    """
    hidden = args[2]
    kept = hidden.new_empty(hidden.shape[0], hidden.shape[1] * _KEPT_BY_GRU_CELL)
    return torch.empty_like(hidden), kept


def fake_gru_cell_backward(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the gradients of the fused GRU step: of both gates, the state and both biases."""
    grad, kept, has_bias = args
    num_gates = kept.shape[1] // _KEPT_BY_GRU_CELL * _GATES_OF_GRU
    gates = [kept.new_empty(kept.shape[0], num_gates) for _ in range(2)]
    biases = [kept.new_empty(num_gates) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad), *biases)


def pack(
    data: torch.Tensor, lengths: Sequence[int], *, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay padded sequences out as ``pack_padded_sequence`` does, knowing their lengths.

    Args:
        data: (time, batch, ...), or (batch, time, ...) with ``batch_first``.
        lengths: of the sequences, longest first.
        batch_first: as in ``pack_padded_sequence``.
    """
    batch_sizes = [sum(length > step for length in lengths) for step in range(max(lengths))]
    rows = (data.transpose(0, 1) if batch_first else data).reshape(-1, *data.shape[2:])
    return rows[: sum(lengths)].clone(), torch.tensor(batch_sizes)


def _pad(
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
    grad: torch.Tensor, shape: Sequence[int], _batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:
    """Return the gradient of the padded sequences; its rows are copied into it.

    Source: ``_pack_padded_sequence_backward`` in aten/src/ATen/native/PackedSequence.cpp.
    """
    shape = [shape[1], shape[0], *shape[2:]] if batch_first else list(shape)
    out = grad.new_zeros(shape)
    return out.transpose(0, 1) if batch_first else out
