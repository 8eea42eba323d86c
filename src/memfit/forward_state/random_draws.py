"""Tells quickly whether a forward has drawn from Python's, numpy's or a user's own generators."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from memfit.live_state.generators import access_to, are_same
from memfit.live_state.snapshot import undisturbed

_WORDS = "i624I"
_NUM_BYTES = struct.calcsize(_WORDS)
_HEAD_BYTES = object.__basicsize__
"""What comes before a generator's position and its 624 words (cpython/Modules/_randommodule.c)."""
_HAS_GAUSS = 3
_python: Any = random._inst


class _Reader:
    """Read the state of a global generator only if it has moved on since."""

    library: str

    def __init__(self) -> None:
        self._content: Any = None
        self._state: Any = None

    def here(self) -> Any:
        """Return the state; the same object for as long as nothing is drawn."""
        content = self.content()
        if content is None or content != self._content:
            self._content, self._state = content, self.state()
        return self._state

    def content(self) -> Any:
        """Return the memory that the state lies in; None where it is not known where that is."""
        raise NotImplementedError

    def state(self) -> Any:
        """Read the state."""
        raise NotImplementedError

    def put_back(self, state: Any) -> None:
        """Set the state."""
        raise NotImplementedError


class _Python(_Reader):
    """The generator behind the functions of ``random``."""

    library = "random"

    def __init__(self) -> None:
        super().__init__()
        words = struct.unpack(_WORDS, self._memory())
        version, state, _ = random.getstate()
        self._is_known = version == 3 and state == (*words[1:], words[0])

    def content(self) -> Any:
        return (self._memory(), _python.gauss_next) if self._is_known else None

    def state(self) -> Any:
        return random.getstate()

    def put_back(self, state: Any) -> None:
        random.setstate(state)

    @staticmethod
    def _memory() -> bytes:
        return ctypes.string_at(id(_python) + _HEAD_BYTES, _NUM_BYTES)


class _Numpy(_Reader):
    """The generator behind the functions of ``numpy.random``.

    A normal value that was drawn in advance lies elsewhere than the rest; while there is one, the
    state is read every time.
    """

    library = "numpy"

    def content(self) -> Any:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # missing in the stubs
        if type(bits) is not np.random.MT19937:
            return None
        if self._state is not None and self._state[_HAS_GAUSS]:
            return None
        return (id(bits), ctypes.string_at(bits.ctypes.state_address, _NUM_BYTES))

    def state(self) -> Any:
        return np.random.get_state()

    def put_back(self, state: Any) -> None:
        np.random.set_state(state)


_GLOBAL = (_Python(), _Numpy())


class RandomPositions:
    """Where generators stand: those of Python and numpy, and the user's own ones.

    Args:
        own: the user's generators.
    """

    __slots__ = ("_global", "_own")

    def __init__(self, own: Sequence[Any]) -> None:
        self._global = [reader.here() for reader in _GLOBAL]
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
        for reader, state in zip(_GLOBAL, self._global, strict=True):
            if reader.here() is not state:
                return reader.library
        with undisturbed():
            for access, generator, state in self._own:
                if not are_same(access.read(generator), state):
                    kind = type(generator)
                    return f"a {kind.__module__.partition('.')[0]} {kind.__name__} of its own"
        return None

    def put_back(self) -> None:
        """Set the generators to where they stood."""
        for reader, state in zip(_GLOBAL, self._global, strict=True):
            if reader.here() is not state:
                reader.put_back(state)
        if self._own:
            with undisturbed():
                for access, generator, state in self._own:
                    access.write(generator, state)
