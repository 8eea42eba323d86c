"""Writes files so that a reader sees the old content or the new one, never a part."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from memfit.errors import FullDiskError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space, no more of a quota, no larger file: a limit of the process, or of the file system."""
_FAILS = frozenset({errno.EIO, errno.EROFS})
"""The device fails, or its file system has become one that is only read."""


def check_place(path: Path) -> None:
    """Refuse a place where no file can be written, before the work whose results go there.

    Raises:
        OSError: if it is a folder, lies below what is none, or its folder may not be written to.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        return  # what is no file, such as /dev/null, is written to
    above = next(each for each in path.absolute().parents if each.exists())
    if not above.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(above))
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(above))


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a whole file, or leave it as it was.

    Raises:
        FullDiskError: if the disk has no room for it.
    """
    data = content.encode() if isinstance(content, str) else content
    replace_atomically(path, lambda part: part.write_bytes(data), needed_bytes=len(data))


def replace_atomically(
    path: Path, write: Callable[[Path], object], *, needed_bytes: int | None = None
) -> None:
    """Have ``write`` fill a file beside ``path``, then put it in its place in one move.

    A new file may be read by whom the umask lets read it; one that is replaced keeps its mode.
    What is no file, such as ``/dev/null``, is written to and stays what it is.

    Args:
        path: of the file.
        write: fills the file that it is given.
        needed_bytes: how large it becomes, where that is known.

    Raises:
        FullDiskError: if the disk has no room for it.
    """
    with naming_full_disk(path, needed_bytes):
        mode = _mode_of(path)
        if mode is not None and not stat.S_ISREG(mode):
            write(path)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = _new_part(path)
        try:
            write(part)
            with part.open("rb") as written:
                os.fsync(written.fileno())
            if mode is not None:
                part.chmod(stat.S_IMODE(mode))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def fill_atomically(
    path: Path, fill: Callable[[IO[bytes]], object], *, needed_bytes: int | None = None
) -> None:
    """Have ``fill`` write to an open file that then takes its place in one move.

    Where torch opens a file by its name itself, it does not tell that the disk is full.

    Args:
        path: of the file.
        fill: writes to the open file that it is given.
        needed_bytes: how large it becomes, where that is known.

    Raises:
        FullDiskError: if the disk has no room for it.
    """

    def write(part: Path) -> None:
        with part.open("wb") as file:
            fill(file)

    replace_atomically(path, write, needed_bytes=needed_bytes)


@contextmanager
def naming_full_disk(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn what a disk raises, also inside of another error, into an error that names the disk.

    Raises:
        FullDiskError: in the place of what a full disk raises.
        OSError: with the path, in the place of what another failure of the disk raises.
    """
    try:
        yield
    except FullDiskError:
        raise
    except (OSError, RuntimeError) as error:  # torch.save raises what is no OSError
        if (full := _caused_by(error, _FULL)) is not None:
            raise full_disk(path, full, needed_bytes) from error
        failure = _caused_by(error, _FAILS)
        if failure is None or (failure is error and failure.filename):
            raise
        raise OSError(failure.errno, failure.strerror, failure.filename or str(path)) from error


def full_disk(path: Path, error: OSError, needed_bytes: int | None = None) -> FullDiskError:
    """Return what to say of a file that found no room."""
    is_space = error.errno == errno.ENOSPC
    reason = "no space left" if is_space else os.strerror(error.errno or 0)
    return FullDiskError(str(path), reason, needed_bytes, _free_bytes(path))


def _caused_by(error: BaseException | None, numbers: Collection[int]) -> OSError | None:
    """Find an error of the system with one of these numbers among those that led to an error."""
    for _ in range(10):
        if error is None or (isinstance(error, OSError) and error.errno in numbers):
            return error
        error = error.__cause__ or error.__context__
    return None


def _free_bytes(path: Path) -> int | None:
    """Return what is free on the disk of a file, or of the folder that it would be in."""
    for folder in (path.parent, *path.parent.parents):
        try:
            return shutil.disk_usage(folder).free
        except OSError:
            continue
    return None


def _mode_of(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _new_part(path: Path) -> Path:
    """Make an empty file beside another, of the mode that the umask gives."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            part.touch(exist_ok=False)
        except FileExistsError:
            continue
        return part


def foreign_file(folder: Path, own: re.Pattern[str]) -> Path | None:
    """Return something below a folder whose path in it does not match; None if all is one's own.

    Folders count where they are empty or links.
    """
    for place, folders, names in os.walk(folder):
        inside = Path(place)
        links = [name for name in folders if (inside / name).is_symlink()]
        for name in sorted([*names, *links]):
            if not own.fullmatch((inside / name).relative_to(folder).as_posix()):
                return inside / name
    return None


def remove_own_folder(folder: Path, own: re.Pattern[str]) -> Path | None:
    """Remove a folder in which all matches, and return None; else leave all, and return one."""
    foreign = foreign_file(folder, own)
    if foreign is None:
        shutil.rmtree(folder, ignore_errors=True)
    return foreign
