"""Finds the lines that draw from generators of ``random`` and numpy, which no operator shows."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from memfit.trace.origins import name_of_file


class DrawLines:
    """Note the first line of the user's code at which each library's generator moves on.

    Attributes:
        found: the line of each library, as ``folder/file.py:12``. A library is missing where its
            generator did not move, or moved in a thread that is not this one.
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._states = _states()
        self._last = ""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Look at the generators after each line of the user's code that runs inside."""
        traced_before = sys.gettrace()
        sys.settrace(self._entered)
        try:
            yield
        finally:
            sys.settrace(traced_before)

    def _entered(self, frame: FrameType, _event: str, _argument: object) -> Any:
        if not _is_the_users(frame):
            return None
        self._look(frame)
        return self._moved_on

    def _moved_on(self, frame: FrameType, event: str, _argument: object) -> Any:
        # What runs next belongs to the line that called, once a function has returned.
        self._look(_user_frame(frame.f_back) if event == "return" else frame)
        return self._moved_on

    def _look(self, next_frame: FrameType | None) -> None:
        now = _states()
        for library, state in now.items():
            if state != self._states[library]:
                self.found.setdefault(library, self._last)
        self._states = now
        self._last = _line(next_frame)


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _is_the_users(frame):
        frame = frame.f_back
    return frame


def _is_the_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return bool(name_of_file(file)) and file != random.__file__


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    return f"{name_of_file(frame.f_code.co_filename)}:{frame.f_lineno}"


def _states() -> dict[str, Any]:
    """Return what tells whether a generator has moved on; equal if it has not."""
    kind, words, *others = np.random.get_state()
    return {"random": random.getstate(), "numpy": (kind, np.asarray(words).tobytes(), *others)}
