"""What steps leave behind besides gradients: read as named values, and compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.forward_state.left_behind import lies_in
from memfit.live_state import LiveState, read
from memfit.live_state.generators import are_same

_MOST_NAMED = 5
_OPTIMIZERS_OWN = ("optimizer.state", "optimizer._need_device_dtype_check_for_fused")
"""What an optimizer keeps, and whether a fused one has looked at its parameters' types."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What can be reached after some steps, by the names under which it is reached."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors, arrays and floating-point numbers, which may differ by rounding."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Counts, words, sizes of lists: they are equal or they are not."""
    generators: Mapping[str, Any] = field(default_factory=dict)
    """The states of generators of random numbers."""


def left_behind(state: LiveState, known: Iterable[torch.Tensor]) -> LeftBehind:
    """Read everything that can be reached now, but for what the optimizer keeps.

    A plan may have the optimizer keep something else; parameters after several steps tell of it.

    Args:
        state: of the objects in question.
        known: tensors that are compared elsewhere.
    """
    reading = read(state)
    known_ids = {id(tensor) for tensor in known}
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, object] = {}
    for name, tensor in reading.tensors:
        if id(tensor) not in known_ids and tensor.layout is torch.strided:
            tensors[_new_name(name, tensors)] = tensor.detach()
    for name, value in reading.values:
        if any(own in name for own in _OPTIMIZERS_OWN):
            continue
        if isinstance(value, float):
            tensors[_new_name(name, tensors)] = torch.tensor(value, dtype=torch.float64)
        else:
            values[_new_name(name, values)] = value
    return LeftBehind(tensors, values, dict(reading.generators))


def _new_name(name: str, taken: Mapping[str, object]) -> str:
    """Number names that several things have."""
    if name not in taken:
        return name
    return next(new for count in itertools.count(2) if (new := f"{name} ({count})") not in taken)


def differing_values(
    found: LeftBehind,
    expected: LeftBehind,
    words: tuple[str, str] = ("after the plan", "after the plain step"),
) -> list[str]:
    """Name the values that differ, in sentences, the first few of them."""
    return [
        f"{name}: {_shown(found.values, name)} {words[0]}, "
        f"{_shown(expected.values, name)} {words[1]}"
        for name in _differing(found.values, expected.values)
    ][:_MOST_NAMED]


def unsteady_names(found: LeftBehind, again: LeftBehind) -> frozenset[str]:
    """Name what is not the same after the same steps."""
    tensors = [
        name
        for name, tensor in found.tensors.items()
        if name not in again.tensors or not torch.equal(tensor, again.tensors[name])
    ]
    return frozenset((*tensors, *_differing(found.values, again.values)))


def without(left: LeftBehind, names: frozenset[str]) -> LeftBehind:
    """Leave some tensors and values out, with what lies below them."""
    if not names:
        return left
    return LeftBehind(
        {name: tensor for name, tensor in left.tensors.items() if not lies_in(name, names)},
        {name: value for name, value in left.values.items() if not lies_in(name, names)},
        left.generators,
    )


def _differing(values: Mapping[str, object], others: Mapping[str, object]) -> list[str]:
    names = dict.fromkeys((*others, *values))
    return [name for name in names if _shown(values, name) != _shown(others, name)]


def differing_draws(found: LeftBehind, expected: LeftBehind) -> list[str]:
    """Name the generators that were drawn from more or less often."""
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
