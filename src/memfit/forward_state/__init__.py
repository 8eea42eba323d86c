"""Keeps what a forward changes besides its results, so that it can run again, or in pieces."""

from memfit.forward_state.left_behind import Left
from memfit.forward_state.random_draws import RandomPositions
from memfit.forward_state.state import (
    Before,
    ForwardState,
    learning_noted,
    not_repeatable,
    tensors_held,
)

__all__ = [
    "Before",
    "ForwardState",
    "Left",
    "RandomPositions",
    "learning_noted",
    "not_repeatable",
    "tensors_held",
]
