"""Reads what a process takes of the host's memory."""

from __future__ import annotations

import os
import time
import weakref

_LEAST_SECONDS = 0.1


class ResidentMemory:
    """Read the resident memory of this process, at most ten times a second."""

    def __init__(self) -> None:
        self._read_seconds = -_LEAST_SECONDS
        self._num_bytes: int | None = None
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._file: int | None = None
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:
            return
        weakref.finalize(self, os.close, self._file)

    def num_bytes(self) -> int | None:
        """Return the resident memory; None where the system does not tell it."""
        now_seconds = time.monotonic()
        if self._file is not None and now_seconds - self._read_seconds >= _LEAST_SECONDS:
            self._read_seconds = now_seconds
            self._num_bytes = int(os.pread(self._file, 128, 0).split()[1]) * self._page_bytes
        return self._num_bytes
