"""Reads what a walk has found as named values, so that two outcomes can be compared."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.live_state.containers import Kind
from memfit.live_state.findings import Place, is_plain
from memfit.live_state.generators import access_to
from memfit.live_state.random_sources import RandomSourcesReader
from memfit.live_state.reach import Found
from memfit.live_state.state import LiveState


@dataclass(frozen=True, slots=True)
class Reading:
    """What could be reached at one moment, each under the first name that led to it."""

    tensors: list[tuple[str, torch.Tensor]]
    """Tensors as they are, not copied, and arrays as tensors."""
    values: list[tuple[str, Any]]
    """Plain values, and how many entries containers hold."""
    generators: list[tuple[str, Any]]
    """States of generators of random numbers, as they give them themselves."""


def read(state: LiveState) -> Reading:
    """Read everything that can be reached now, by name."""
    parts = state.found()
    randomness = RandomSourcesReader().here()
    tensors = [(place.text, tensor) for found in parts for tensor, place, _ in found.tensors]
    tensors += [
        (place.text, torch.from_numpy(array.copy()))
        for found in parts
        for array, place in found.arrays
        if array.dtype.kind in "biufc"
    ]
    generators: list[tuple[str, Any]] = [
        ("torch's generator", randomness.cpu),
        ("Python's generator", randomness.python),
        ("numpy's generator", pickle.dumps(randomness.numpy)),
    ]
    generators += [
        (place.text, access.read(generator))
        for found in parts
        for generator, place in found.generators
        if (access := access_to(type(generator))) is not None
    ]
    return Reading(tensors, [value for found in parts for value in _values(found)], generators)


def tensors_of(state: LiveState, *, left_out: bool = False) -> list[torch.Tensor]:
    """List the tensors that can be reached, or those of them whose content is kept elsewhere."""
    found = (each for part in state.found() for each in part.tensors)
    return [tensor for tensor, _, is_kept in found if not (left_out and is_kept)]


def contents_of(state: LiveState) -> list[Any]:
    """List the tensors and arrays that can be reached."""
    arrays = [array for part in state.found() for array, _ in part.arrays]
    return [*tensors_of(state), *arrays]


def reaches(state: LiveState, instance: object) -> bool:
    """Return whether an object can be reached."""
    return any(id(instance) in part.seen for part in state.found())


def _values(found: Found) -> Iterator[tuple[str, Any]]:
    for kind, group in found.groups.items():
        for target, place in zip(group.targets, group.places, strict=True):
            yield from _values_in(kind, target, place)


def _values_in(kind: Kind, target: Any, place: Place) -> Iterator[tuple[str, Any]]:
    entries = [*kind.named(target, kind.copy(target))]
    if not kind.is_namespace:
        yield f"entries in {place.text}", len(entries)
    for name, value in entries:
        if is_plain(name) and is_plain(value):
            at = place.attribute(name) if kind.is_namespace else place.item(name)
            yield at.text, value
