"""Appends lines to a file, each in one piece and at once, and reads lines of JSON."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit.errors import DataError
from memfit.files import naming_full_disk
from memfit.units import MIB

from .plain_text import parsed_json

MOST_FILE_BYTES = 64 * MIB
"""Thirty times what a run writes by itself; a loop of one's own may tell of very many events."""
_MOST_LINE_BYTES = MIB


class LineFile:
    """Append lines to a file; each is whole in it before ``add`` returns, whatever happens next.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        # Not a text file: its layers take as long again as the system's own write.
        self._path = path
        with naming_full_disk(path):
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self._file)  # not every run is closed
        self._is_cut = _is_cut_off(self._file)  # of a process that was killed

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


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a file, none where there is no file.

    A line that is something else is left out: the last one may have been cut off with its process.

    Raises:
        DataError: if the file is larger than any journal.
    """
    if not path.exists():
        return
    if path.stat().st_size > MOST_FILE_BYTES:
        reason = (
            f"it is larger than {MOST_FILE_BYTES:,} bytes; its last lines alone can be read "
            "(tail --lines 100000)"
        )
        raise DataError(str(path), reason)
    with path.open("rb") as file:
        for line in file:
            if len(line) > _MOST_LINE_BYTES:
                continue
            try:
                row = parsed_json(line.decode("utf-8", errors="replace"))
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def _is_cut_off(file: int) -> bool:
    """Return whether the last line of an open file lacks its end."""
    length = os.fstat(file).st_size
    return length > 0 and os.pread(file, 1, length - 1) != b"\n"
