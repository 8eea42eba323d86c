"""Keeps a run folder for one run at a time, whatever becomes of the process that holds it.

The lock is the system's, on a file in the folder: it ends with the process, also with one that was
killed. What the file says is for the reader alone. Where a file system has no locks, nothing is
held.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from memfit.errors import UsageError
from memfit.files import naming_full_disk

LOCK_NAME = ".memfit-run"
"""In the folder of a run: who runs in it, and afterwards that one did."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_MOST_CHARACTERS = 200


class FolderLock:
    """Hold a folder until ``release``, or until this process ends.

    Args:
        folder: that is there already.

    Raises:
        UsageError: if another run holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        with naming_full_disk(self._path):
            self._file = self._locked()

    def release(self, *, keeps_file: bool) -> None:
        """Let go of the folder; the file may stay as a sign of the run."""
        if not keeps_file:
            with suppress(OSError):  # the folder may have gone meanwhile
                self._path.unlink()
        os.close(self._file)

    def _locked(self) -> int:
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(file, _MOST_CHARACTERS).decode(errors="replace").strip()
                os.close(file)
                raise UsageError(_in_use(self._path.parent, holder)) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return file
            if _is_at(file, self._path):  # else the run before has just removed it
                with suppress(OSError):  # a full disk: it is a lock also without the words
                    os.ftruncate(file, 0)
                    os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return file
            os.close(file)


_HELD: dict[Path, FolderLock] = {}


def hold_folder(folder: Path) -> None:
    """Hold a folder until this process ends; a run after another in it has it already.

    Raises:
        UsageError: if a run of another process holds it.
    """
    place = folder.resolve()
    if place not in _HELD:
        _HELD[place] = FolderLock(folder)


def _in_use(folder: Path, holder: str) -> str:
    return (
        f"{folder} is in use: {holder or 'another process'} runs in it. Wait for its end, or give "
        "another folder."
    )


def _is_at(file: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(file), there)
