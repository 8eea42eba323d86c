"""Random draws of a module beside torch's own generators, so that they can be drawn again."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class _Source:
    """A random generator, by what reads and sets its state."""

    read: Callable[[], Any]
    put_back: Callable[[Any], Any]
    latest: Any = None

    def state(self) -> Any:
        """Read the state; the same object as long as nothing is drawn."""
        state = self.read()
        if self.latest is None or not _is_same(state, self.latest):
            self.latest = state
        return self.latest


class DrawSources:
    """The generators that a module may draw from besides torch's own, whose states torch keeps.

    They are Python's and numpy's global ones, and generators that modules hold as attributes.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._sources = [_Source(random.getstate, random.setstate)]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            self._sources.append(_Source(numpy.random.get_state, numpy.random.set_state))
        held = {id(v): v for part in module.modules() for v in vars(part).values()}
        self._sources += [s for value in held.values() if (s := _source_of(value)) is not None]

    def here(self) -> tuple[Any, ...]:
        """Read all states."""
        return tuple(source.state() for source in self._sources)

    def put_back(self, states: tuple[Any, ...]) -> None:
        """Set all states."""
        for source, state in zip(self._sources, states, strict=True):
            source.put_back(state)

    @contextmanager
    def again(self, states: tuple[Any, ...]) -> Iterator[None]:
        """Draw from other states for a while."""
        before = self.here()
        self.put_back(states)
        try:
            yield
        finally:
            self.put_back(before)


def _source_of(value: Any) -> _Source | None:
    """Describe a generator; None for anything else."""
    if isinstance(value, torch.Generator):
        set_state: Callable[[Any], Any] = value.set_state
        return _Source(value.get_state, set_state)
    if isinstance(value, random.Random):
        return _Source(value.getstate, value.setstate)
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return _Source(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, numpy.random.RandomState):
        return _Source(value.get_state, value.set_state)
    return None


def _is_same(first: Any, second: Any) -> bool:
    """Compare two states of one generator."""
    if isinstance(first, torch.Tensor):
        return bool(torch.equal(first, second))
    if isinstance(first, dict):
        return all(_is_same(first[key], second[key]) for key in first)
    if isinstance(first, tuple):
        return all(map(_is_same, first, second))
    if hasattr(first, "tobytes"):
        return bool(first.tobytes() == second.tobytes())
    return bool(first == second)
