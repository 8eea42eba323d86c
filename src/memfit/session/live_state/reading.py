"""Reads what a walk has found as named values, so that two outcomes can be compared."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memfit.session.live_state.containers import Kind
from memfit.session.live_state.findings import Place, is_plain
from memfit.session.live_state.generators import access_to
from memfit.session.live_state.walk import Found
from memfit.session.random_sources import GlobalRandomness


@dataclass(frozen=True, slots=True)
class Reading:
    """What could be reached at one moment, each under the first name that led to it."""

    tensors: list[tuple[str, torch.Tensor]]
    """Tensors as they are, not copied, and arrays as tensors."""
    values: list[tuple[str, Any]]
    """Plain values, and how many entries containers hold."""
    generators: list[tuple[str, Any]]
    """States of generators of random numbers, as they give them themselves."""


def read(found: Found, randomness: GlobalRandomness) -> Reading:
    """Read everything that a walk has found."""
    tensors = [(place.text, tensor) for tensor, place, _ in found.tensors]
    tensors += [
        (place.text, torch.from_numpy(array.copy()))
        for array, place in found.arrays
        if array.dtype.kind in "biufc"
    ]
    generators: list[tuple[str, Any]] = [
        ("torch's generator", randomness.sources.torch.cpu),
        ("Python's generator", randomness.sources.python),
        ("numpy's generator", pickle.dumps(randomness.sources.numpy)),
    ]
    generators += [
        (place.text, access.read(generator))
        for generator, place in found.generators
        if (access := access_to(type(generator))) is not None
    ]
    return Reading(tensors, [*_values(found)], generators)


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
