"""Appends lines to a file, whole ones only and not too often."""

from __future__ import annotations

import time
import weakref
from pathlib import Path
from typing import IO

_LEAST_SECONDS = 0.1


class LineFile:
    """Append lines to a file at most ten times a second: what a kill loses is that young.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._waiting: list[str] = []
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._written_seconds = 0.0
        # A run that fails is not always closed.
        self._finish = weakref.finalize(self, _finish, self._file, self._waiting)

    def add(self, line: str) -> None:
        """Add a line, which ends with a newline."""
        self._waiting.append(line)
        now_seconds = time.monotonic()
        if now_seconds - self._written_seconds >= _LEAST_SECONDS:
            self._written_seconds = now_seconds
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        _write(self._file, self._waiting)

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._finish()


def _write(file: IO[str], waiting: list[str]) -> None:
    if waiting:
        file.write("".join(waiting))
        waiting.clear()


def _finish(file: IO[str], waiting: list[str]) -> None:
    try:
        _write(file, waiting)
    finally:
        file.close()
