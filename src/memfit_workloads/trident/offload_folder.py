"""``--offload-folder``: where a run may write what does not fit on the device."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from memfit.errors import DataError
from memfit.units import MIB, format_bytes

_LEAST_FREE_BYTES = 64 * MIB
_PROBE_BYTES = MIB
_IN_MEMORY = {"tmpfs", "ramfs"}
_VARIABLE = "TMPDIR"


@contextmanager
def spilling_to(folder: Path | None) -> Iterator[None]:
    """Have what strategies write to disk lie in a folder; files there have no names.

    Raises:
        DataError: if it cannot be written to, or has no room.
    """
    if folder is None:
        yield
        return
    _check(folder)
    before, variable = tempfile.tempdir, os.environ.get(_VARIABLE)
    tempfile.tempdir = os.environ[_VARIABLE] = str(folder.resolve())
    try:
        yield
    finally:
        tempfile.tempdir = before
        if variable is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = variable


def room_bytes(folder: Path) -> int:
    """Return how many bytes may be written to a folder."""
    return shutil.disk_usage(folder).free


def lies_in_memory(folder: Path) -> bool:
    """Return whether a folder is of a file system that keeps its files in memory."""
    place = folder.resolve()
    mounts = [
        each
        for each in psutil.disk_partitions(all=True)
        if place.is_relative_to(each.mountpoint)
    ]  # fmt: skip
    nearest = max(mounts, key=lambda each: len(each.mountpoint), default=None)
    return nearest is not None and nearest.fstype in _IN_MEMORY


def _check(folder: Path) -> None:
    """Make the folder, and write to it once.

    Raises:
        DataError: if that fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(prefix="memfit-", dir=folder, buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())
        free_bytes = room_bytes(folder)
    except OSError as error:
        reason = (
            f"nothing can be written there ({error.strerror or error}). Give --offload-folder a "
            "folder on a disk with room, or leave it out."
        )
        raise DataError(str(folder), reason) from None
    if free_bytes < _LEAST_FREE_BYTES:
        reason = (
            f"it has {format_bytes(free_bytes)} free, and at least "
            f"{format_bytes(_LEAST_FREE_BYTES)} are needed to offload to. Make room, give "
            "--offload-folder another folder, or leave it out."
        )
        raise DataError(str(folder), reason)
