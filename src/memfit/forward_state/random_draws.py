"""Tells quickly whether a forward has drawn from Python's, numpy's or a user's own generators."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from memfit.live_state.generators import access_to, are_same
from memfit.live_state.random_sources import NumpyReader, PythonReader
from memfit.live_state.snapshot import undisturbed

_GLOBAL: tuple[tuple[str, PythonReader | NumpyReader, Any], ...] = (
    ("random", PythonReader(), random.setstate),
    ("numpy", NumpyReader(), np.random.set_state),
)
"""The libraries with a generator that belongs to nobody, and how its state is read and set."""


class RandomPositions:
    """Where generators stand: those of Python and numpy, and the user's own ones.

    Args:
        own: the user's generators.
    """

    __slots__ = ("_global", "_own")

    def __init__(self, own: Sequence[Any]) -> None:
        self._global = [reader.here() for _, reader, _ in _GLOBAL]
        self._own: list[tuple[Any, Any, Any]] = []
        if own:
            with undisturbed():
                self._own += (
                    (access, generator, access.read(generator))
                    for generator in own
                    if (access := access_to(type(generator))) is not None
                )

    def first_moved(self) -> str | None:
        """Name a generator that has been drawn from since; None if there is none."""
        for (library, reader, _), state in zip(_GLOBAL, self._global, strict=True):
            if reader.here() is not state:
                return library
        with undisturbed():
            for access, generator, state in self._own:
                if not are_same(access.read(generator), state):
                    kind = type(generator)
                    return f"a {kind.__module__.partition('.')[0]} {kind.__name__} of its own"
        return None

    def put_back(self) -> None:
        """Set the generators to where they stood."""
        for (_, reader, put_back), state in zip(_GLOBAL, self._global, strict=True):
            if reader.here() is not state:
                put_back(state)
        if self._own:
            with undisturbed():
                for access, generator, state in self._own:
                    access.write(generator, state)
