"""Appends lines to a file, each in one piece and at once."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from memfit.files import naming_full_disk


class LineFile:
    """Append lines to a file; each is whole in it before ``add`` returns, whatever happens next.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        # Not a text file: its layers take as long again as the system's own write.
        self._path, self._is_cut = path, False
        with naming_full_disk(path):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self._file)  # not every run is closed

    def add(self, line: str) -> None:
        """Add a line, which ends with a newline.

        Raises:
            FullDiskError: if there is no room for it.
        """
        # After a line that found no room, the next one begins a line of its own.
        rest = f"\n{line}".encode() if self._is_cut else line.encode()
        try:
            self._is_cut = True
            while rest:
                rest = rest[os.write(self._file, rest) :]
            self._is_cut = False
        except OSError:
            with naming_full_disk(self._path, len(rest)):
                raise

    def close(self) -> None:
        """Close the file."""
        self._close()
