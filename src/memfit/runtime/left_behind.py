"""What steps leave behind besides gradients: read as named values, and compared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.session.live_state import LiveState

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What can be reached after some steps, by the names under which it is reached."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors, arrays and floating-point numbers, which may differ by rounding."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Counts, words, sizes of lists: they are equal or they are not."""
    generators: Mapping[str, Any] = field(default_factory=dict)
    """The states of generators of random numbers."""


def left_behind(state: LiveState, known: Iterator[torch.Tensor]) -> LeftBehind:
    """Read everything that can be reached now.

    Args:
        state: of the objects in question.
        known: tensors that are compared elsewhere.
    """
    reading = state.reading()
    known_ids = {id(tensor) for tensor in known}
    tensors = {
        name: tensor.detach()
        for name, tensor in reading.tensors
        if id(tensor) not in known_ids and tensor.layout is torch.strided
    }
    values: dict[str, object] = {}
    for name, value in reading.values:
        if isinstance(value, float):
            tensors[name] = torch.tensor(value, dtype=torch.float64)
        else:
            values[name] = value
    return LeftBehind(tensors, values, dict(reading.generators))


def differing_values(found: LeftBehind, expected: LeftBehind) -> list[str]:
    """Name the values that differ, in sentences, the first few of them."""
    names = dict.fromkeys((*expected.values, *found.values))
    sentences = [
        f"{name}: {_shown(found.values, name)} after the plan, "
        f"{_shown(expected.values, name)} after the plain step"
        for name in names
        if _shown(found.values, name) != _shown(expected.values, name)
    ]
    return sentences[:_MOST_NAMED]


def differing_draws(found: LeftBehind, expected: LeftBehind) -> list[str]:
    """Name the generators that were drawn from more or less often."""
    from memfit.session.live_state.generators import are_same

    names = dict.fromkeys((*expected.generators, *found.generators))
    return [
        name
        for name in names
        if name not in found.generators
        or name not in expected.generators
        or not are_same(found.generators[name], expected.generators[name])
    ]


def _shown(values: Mapping[str, object], name: str) -> str:
    return repr(values[name]) if name in values else "nothing"
