"""Memory of cuDNN's recurrent layers: what forward keeps for backward, and the workspace.

cuDNN tells these sizes at run time only. The laws here reproduce the sizes that were published
for cuDNN of 2017; newer versions pick other kernels, so everything is a guess with an interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memfit.kernels.base import Scratch
from memfit.kernels.cuda.answers import (
    GUESS,
    between,
    copied_bytes,
)
from memfit.kernels.cuda.card import Card

_SOURCE = "pytorch issue 2895, sizes printed by cuDNN on a P100 (2017-10-04)"
_MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_KEPT_PER_LAYER = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 5, "gru": 6}
_RESERVE_LOW, _RESERVE_HIGH = 0.75, 1.75


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
    def of(cls, args: tuple[Any, ...]) -> Recurrence:
        """Read the sizes off the arguments of ``_cudnn_rnn``."""
        image, state = args[0], args[4]
        return cls(
            mode=_MODES[int(args[6])],
            num_layers=int(args[9]),
            num_directions=2 if args[13] else 1,
            num_rows=image.numel() // int(image.shape[-1]),
            batch_size=int(state.shape[-2]),
            num_inputs=int(image.shape[-1]),
            hidden=int(args[7]),
            width=image.element_size(),
            has_dropout=bool(args[11]),
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
    between = (recurrence.num_layers - 1) * (2 if recurrence.has_dropout else 1)
    arrays = _KEPT_PER_LAYER[recurrence.mode] * recurrence.num_layers + between
    return arrays * recurrence.array_bytes


def rnn_reserve(recurrence: Recurrence) -> Scratch:
    """Return ``rnn_reserve_bytes`` with its interval: a quarter less to three quarters more.

    The lower end leaves the cell of an LSTM out, the upper one allows for a second copy of the
    gates' inputs. Neither was measured.
    """
    likely = rnn_reserve_bytes(recurrence)
    return between(
        _SOURCE,
        (likely,),
        low_bytes=int(_RESERVE_LOW * likely),
        high_bytes=int(_RESERVE_HIGH * likely),
        certainty=GUESS,
    )


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
    return between(
        _SOURCE,
        (likely,),
        low_bytes=0,
        high_bytes=2 * likely + gates * recurrence.array_bytes,
        certainty=GUESS,
    )


def rnn_forward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Return the workspace, and a copy of the input where the batch comes first.

    The reserve and the flat weights are outputs of the operator. Source: _cudnn_rnn in
    aten/src/ATen/native/cudnn/RNN.cpp.
    """
    return _with_copies(Recurrence.of(args), _time_first(args[0], batch_first=bool(args[10])))


def rnn_backward(
    args: tuple[Any, ...], _kwargs: Mapping[str, Any], _out: Any, _card: Card
) -> Scratch:
    """Get the workspace and copies of input, output and its gradient where the batch comes first.

    Arguments: input, weights, their stride, flat weights, hx, cx, output, gradients of output, hy
    and cy, then the settings from ``mode`` on. Source: _cudnn_rnn_backward in
    aten/src/ATen/native/cudnn/RNN.cpp.
    """
    settings = (*args[:4], args[4], None, *args[10:])
    batch_first = bool(args[14])
    arrays = [args[0], args[6], *([args[7]] if args[7] is not None else [])]
    copies = [block for array in arrays for block in _time_first(array, batch_first=batch_first)]
    return _with_copies(Recurrence.of(settings), tuple(copies))


def _time_first(tensor: torch.Tensor, *, batch_first: bool) -> tuple[int, ...]:
    turned = tensor.transpose(0, 1) if batch_first and tensor.dim() == 3 else tensor
    return copied_bytes(turned)


def _with_copies(recurrence: Recurrence, copies: tuple[int, ...]) -> Scratch:
    workspace = rnn_workspace(recurrence)
    return between(
        "aten/src/ATen/native/cudnn/RNN.cpp; " + _SOURCE,
        (*copies, *workspace.blocks),
        low_bytes=sum(copies),
        high_bytes=sum(copies) + workspace.high_bytes,
        certainty=GUESS,
    )
