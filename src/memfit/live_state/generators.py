"""Reads and sets the states of random generators: users' own, and the global ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Access:
    """How the state of one type of generator is read, set and compared."""

    kind: type
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]


def _write_bits(generator: Any, state: Any) -> None:
    generator.state = state


def _write_python(generator: Any, state: Any) -> None:
    random.Random.setstate(generator, state)


_ACCESS = (
    Access(
        torch.Generator,
        torch.Generator.clone_state,  # as a tensor the state would count in torch's allocator
        lambda generator, state: generator.set_state(state.get_state()),
    ),
    Access(
        np.random.Generator,
        lambda generator: generator.bit_generator.state,
        lambda generator, state: _write_bits(generator.bit_generator, state),
    ),
    Access(
        np.random.RandomState,
        lambda generator: generator.get_state(legacy=False),
        lambda generator, state: generator.set_state(state),
    ),
    Access(np.random.BitGenerator, lambda bits: bits.state, _write_bits),
    Access(random.Random, random.Random.getstate, _write_python),
)


def access_to(kind: type) -> Access | None:
    """Find out how the state of a type of generator is read and set; None if it is none."""
    if issubclass(kind, random.SystemRandom):
        return None  # the operating system's, which has no state
    return next((access for access in _ACCESS if issubclass(kind, access.kind)), None)


def are_same(one: Any, other: Any) -> bool:
    """Compare two states, as their generators gave them."""
    if isinstance(one, torch.Generator):
        one, other = one.get_state(), other.get_state()
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
