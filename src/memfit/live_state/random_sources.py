"""Keeps the states of all random generators that a step may draw from."""

from __future__ import annotations

import ctypes
import random
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memfit.live_state.generators import are_same

_TWISTER_BYTES = 625 * 4
"""A Mersenne Twister's 624 words and its position (numpy/random/src/mt19937/mt19937.h)."""
_HAS_GAUSS = 3
"""Where numpy's legacy state says that one more normal value lies ready."""
_HEAD_BYTES = object.__basicsize__
"""Of a Python object; in one of ``random.Random`` the position and the words follow, 32 bits each
(cpython/Modules/_randommodule.c, ``RandomObject``)."""


@dataclass(frozen=True, slots=True)
class GlobalRandomness:
    """The states of all generators that belong to nobody: those of the CPU and of every GPU."""

    cpu: torch.Generator
    """A copy of the CPU's: its state as a tensor would count in every step that is kept."""
    python: Any
    numpy: Any
    cards: list[torch.Tensor]
    """Of the GPUs, in their order; none where CUDA has not been started."""

    def put_back(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu.get_state())
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.cards:
            torch.cuda.set_rng_state_all(self.cards)

    def moved(self, reader: RandomSourcesReader) -> dict[str, str]:
        """Name the libraries whose generators have moved on since, each with what tells how far."""
        now = reader.here()
        cards = zip(self.cards, now.cards, strict=False)
        moved = {}
        if not are_same(now.cpu, self.cpu) or any(
            not torch.equal(one, other) for one, other in cards
        ):
            moved["torch"] = ""
        for name, was, is_ in (
            ("numpy", _words(self.numpy), _words(now.numpy)),
            ("random", self.python, now.python),
        ):
            if was != is_:
                moved[name] = f"{zlib.crc32(repr((was, is_)).encode())}"
        return moved


def _has_cards() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_available()


def _words(state: Any) -> Any:
    """Turn a state of numpy's generator into what can be compared."""
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {name: _words(value) for name, value in state.items()}
    return tuple(map(_words, state)) if isinstance(state, tuple) else state


class RandomSourcesReader:
    """Read the states again and again."""

    def __init__(self) -> None:
        self._python = PythonReader()
        self._numpy = NumpyReader()

    def here(self) -> GlobalRandomness:
        """Take the states as they are."""
        cards = torch.cuda.get_rng_state_all() if _has_cards() else []
        cpu = torch.default_generator.clone_state()
        return GlobalRandomness(cpu, self._python.here(), self._numpy.here(), cards)


class PythonReader:
    """Read the state of Python's global generator only if it has moved on since.

    To read it makes 624 numbers, which takes many times as long as looking at the memory that they
    lie in. Only a normal value that was drawn in advance lies elsewhere. Where the memory is not
    laid out as expected, the state is read every time.
    """

    def __init__(self) -> None:
        self._generator: Any = getattr(random.getstate, "__self__", None)
        self._is_laid_out = type(self._generator) is random.Random and self._is_as_expected()
        self._content = b""
        self._state: Any = None

    def here(self) -> Any:
        """Return the state."""
        generator = getattr(random.getstate, "__self__", None)
        if not self._is_laid_out or generator is not self._generator:
            return random.getstate()
        content = self._words()
        if content != self._content or self._state[-1] is not generator.gauss_next:
            self._content, self._state = content, random.getstate()
        return self._state

    def _words(self) -> bytes:
        return ctypes.string_at(id(self._generator) + _HEAD_BYTES, _TWISTER_BYTES)

    def _is_as_expected(self) -> bool:
        position, *words = np.frombuffer(self._words(), np.uint32).tolist()
        return bool((*words, position) == self._generator.getstate()[1])


class NumpyReader:
    """Read the state of numpy's global generator only if it has moved on since.

    Most steps draw nothing from it, and reading the state takes several times as long as looking at
    the memory that it lies in. One thing lies elsewhere, a normal value that was drawn in advance:
    it comes only with other draws, and while there is one, the state is read every time.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0
        self._content = b""
        self._state: Any = None

    def here(self) -> Any:
        """Return the state."""
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # missing in the stubs
        if type(generator) is not np.random.MT19937:
            return np.random.get_state(legacy=False)
        if generator is not self._generator:
            self._generator, self._content = generator, b""
            self._address = generator.ctypes.state_address
        content = ctypes.string_at(self._address, _TWISTER_BYTES)
        if content != self._content or self._state[_HAS_GAUSS]:
            self._content, self._state = content, np.random.get_state()
        return self._state
