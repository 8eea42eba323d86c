"""Files written so that a process killed at any moment leaves the old content or the new one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_MODE = 0o666


def write_new(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file that is not there yet, down to the disk.

    Args:
        path: of the file.
        content: of the file.
        mode: who may do what with it; by default what the umask gives.

    Raises:
        FileExistsError: if it is there.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE if mode is None else mode)
    try:
        if mode is not None:
            os.fchmod(handle, mode)
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def take_place(part: Path, path: Path) -> None:
    """Put a file in the place of another in one move, down to the disk."""
    os.replace(part, path)
    _sync_folder(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write or replace a file of memfit's own."""
    part = path.with_name(f"{path.name}.part")
    remove(part)
    write_new(part, content)
    take_place(part, path)


def remove(path: Path) -> None:
    """Remove a file if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - every change of the disk goes through os, where it is tried


def make_folders(folder: Path) -> None:
    """Make a folder and those above it."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(each)  # noqa: PTH102 - as above
        _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder written down; some systems cannot."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
