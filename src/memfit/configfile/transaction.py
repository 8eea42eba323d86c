"""Several files written as one: all of them new, or all of them old.

The record in ``.memfit/applied`` is written first, then the backups, then the new contents beside
the files, and only then does each take its place. A process that is killed on the way leaves a
record that is not done; the next ``memfit undo`` or ``memfit apply --yes`` puts the old contents
back. Each single file is old or new at every moment.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import ConfigFileError, UndoError
from memfit.files import naming_full_disk

from .disk import make_folders, remove, take_place, write_new
from .history import HISTORY, FileRecord, Record, State, checksum, forget, records, save

_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A file that is to be written, and what it held when the change was worked out."""

    path: Path
    before: bytes
    after: bytes


def common_folder(paths: list[Path], here: Path) -> Path:
    """Return the folder whose history files belong to: this one, or the nearest above them all."""
    whole = [here / path for path in paths]
    if all(path.is_relative_to(here) for path in map(_normal, whole)):
        return _normal(here)
    return Path(os.path.commonpath([_normal(path).parent for path in whole]))


def real_file(path: Path, folder: Path) -> Path:
    """Follow links to the file that is to be written.

    Raises:
        ConfigFileError: if they lead out of the folder.
    """
    real, root = path.resolve(), folder.resolve()
    if not real.is_relative_to(root):
        raise ConfigFileError(
            f"it is a link that leads out of {folder}, to {real}. Name that file itself, from its "
            "own folder",
            path,
        )
    return real


def write_all(folder: Path, rewrites: list[Rewrite]) -> Record:
    """Write files as one, with numbered backups.

    Raises:
        ConfigFileError: if one has changed since it was read, or a link leads out of the folder.
        UndoError: if an earlier apply was cut off and a file has changed since.
    """
    with _locked(folder):
        _check_unchanged(rewrites)
        earlier = records(folder)
        number = earlier[-1].number + 1 if earlier else 1
        root = folder.resolve()
        contents = {real_file(each.path, folder): each for each in rewrites}
        files = tuple(_file_record(root, real, each, number) for real, each in contents.items())
        record = Record(number=number, state=State.WRITING, files=files)
        save(folder, record)
        needed_bytes = sum(len(each.before) + len(each.after) for each in contents.values())
        try:
            with naming_full_disk(folder / HISTORY, needed_bytes):
                _write_beside(root, files, contents.values())
            _check_unchanged(rewrites)
            for file in files:
                take_place(root / file.part, root / file.path)
            save(folder, record.in_state(State.DONE))
        except BaseException as error:
            _put_back(folder, record, even_if_changed=False)
            if isinstance(error, OSError):
                where = error.filename or folder
                raise ConfigFileError(error.strerror or "it cannot be written", where) from None
            raise
        return record.in_state(State.DONE)


def _write_beside(root: Path, files: Iterable[FileRecord], rewrites: Iterable[Rewrite]) -> None:
    """Write backups and new contents beside the files that they are of."""
    for file, each in zip(files, rewrites, strict=True):
        write_new(root / file.backup, each.before, file.mode)
        os.utime(root / file.backup, ns=(file.modified_ns, file.modified_ns))
        write_new(root / file.part, each.after, file.mode)


def undo_last(folder: Path, *, even_if_changed: bool = False) -> Record:
    """Put back what the last apply has replaced, byte for byte.

    Raises:
        UndoError: if there is nothing to undo, or a file has changed since.
    """
    with _locked(folder):
        known = records(folder)
        if not known:
            raise UndoError(f"Nothing has been applied in {folder}, so there is nothing to undo.")
        _put_back(folder, known[-1], even_if_changed=even_if_changed)
        return known[-1]


def put_back_unfinished(folder: Path) -> list[Record]:
    """Put back what an apply or an undo that was cut off has left.

    Raises:
        UndoError: if a file of it has changed since.
    """
    if not unfinished_in(folder):
        return []
    with _locked(folder):
        unfinished = unfinished_in(folder)  # what another process was writing is done by now
        for record in reversed(unfinished):
            _put_back(folder, record, even_if_changed=False)
        return unfinished


def unfinished_in(folder: Path) -> list[Record]:
    """Return the records of what was cut off."""
    return [record for record in records(folder) if record.state is not State.DONE]


def _put_back(folder: Path, record: Record, *, even_if_changed: bool) -> None:
    """Bring every file to its content before; what is cut off here is gone on with by the next."""
    root = folder.resolve()
    _check_as_left(root, record, even_if_changed=even_if_changed)
    if record.state is State.DONE:
        save(folder, record.in_state(State.UNDOING))
    for file in record.files:
        path, backup, part = root / file.path, root / file.backup, root / file.part
        if _sum_of(path) != file.before:
            take_place(backup, path)  # needs no room; it has the mode and the time
        remove(part)
    for file in record.files:
        _remove_own(root / file.backup, root / file.path)
    forget(folder, record)


def _remove_own(backup: Path, path: Path) -> None:
    """Remove a backup that holds what the file holds again, or its beginning if it was cut off.

    What somebody else has put under its name meanwhile stays.
    """
    with suppress(FileNotFoundError):
        if path.read_bytes().startswith(backup.read_bytes()):
            remove(backup)


def _check_as_left(root: Path, record: Record, *, even_if_changed: bool) -> None:
    """Refuse to put back what someone has changed since, or what has no whole backup.

    Raises:
        UndoError: if there is such a file.
    """
    for file in record.files:
        path, backup = root / file.path, root / file.backup
        found = _sum_of(path)
        if found == file.before:
            continue
        if found != file.after and not even_if_changed:
            what = "is gone" if found is None else "has changed"
            raise UndoError(
                f"{path} {what} since the plan was applied, so putting it back would lose that. "
                f"Nothing has been written. What it was before is in {backup}; "
                "`memfit undo --even-if-changed` puts it back all the same."
            )
        if _sum_of(backup) != file.before:
            raise UndoError(
                f"The backup {backup} is gone or has changed, so {path} cannot be put back. "
                "Nothing has been written."
            )


def _check_unchanged(rewrites: list[Rewrite]) -> None:
    for each in rewrites:
        if each.path.read_bytes() != each.before:
            raise ConfigFileError("it has changed while it was read; apply again", each.path)


def _file_record(root: Path, real: Path, rewrite: Rewrite, number: int) -> FileRecord:
    facts = real.stat()
    return FileRecord(
        path=str(real.relative_to(root)),
        backup=str(_free_backup(real).relative_to(root)),
        part=str(real.with_name(f".{real.name}.memfit-{number}.part").relative_to(root)),
        before=checksum(rewrite.before),
        after=checksum(rewrite.after),
        mode=stat.S_IMODE(facts.st_mode),
        modified_ns=facts.st_mtime_ns,
    )


def _free_backup(path: Path) -> Path:
    """Return the first numbered name that nothing has."""
    number = 1
    while os.path.lexists(found := path.with_name(f"{path.name}.backup-{number}")):
        number += 1
    return found


def _sum_of(path: Path) -> str | None:
    try:
        return checksum(path.read_bytes())
    except FileNotFoundError:
        return None


def _normal(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - links stay as they are named


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second apply or undo in the folder waiting; say where the disk fails."""
    with naming_full_disk(folder / HISTORY):
        make_folders(folder / HISTORY)
        handle = os.open(folder / HISTORY / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def backups_of(record: Record, folder: Path) -> Mapping[Path, Path]:
    """Return where the old content of each file is."""
    root = folder.resolve()
    return {root / file.path: root / file.backup for file in record.files}
