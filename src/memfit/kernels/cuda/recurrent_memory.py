"""What cuDNN keeps and takes for recurrent layers.

cuDNN tells these sizes at run time only. The laws here reproduce the sizes that were measured with
cuDNN 9.19 on an H200; they were found on a few stacks of layers, so everything is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from memfit.figures import Certainty
from memfit.kernels.cuda.card import Card
from memfit.kernels.scratch import Scratch
from memfit.units import MIB

MEASURED = "sizes measured with cuDNN 9.19 on an H200, torch 2.11.0+cu130 (2026-11-26)"
MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""cudnnRNNMode_t, in the order of its enumerators."""
GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_KEPT_PER_LAYER = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 5, "gru": 6}
_PRODUCT_BYTES = 8 * MIB
_DROPOUT_HEAD_BYTES = 256
_STATE_PER_THREAD_BYTES = 24
"""What cuDNN's generator keeps of each thread that a card can have in flight."""


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
            mode=MODES[arguments["mode"]],
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
        return GATES[self.mode] * per_gate * self.width


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
    low = recurrence.weight_bytes + (3 * GATES[recurrence.mode] - 2) * layers * states
    kept = _KEPT_PER_LAYER[recurrence.mode] * recurrence.array_bytes
    likely = low + kept + 2 * recurrence.input_bytes + layers * _PRODUCT_BYTES
    return Scratch.between(
        MEASURED,
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
