"""What has been applied in a folder: one record per apply, below ``.memfit/applied``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from memfit.errors import UndoError
from memfit.journal.plain_text import parsed_json

from .disk import make_folders, remove, write_whole

HISTORY = Path(".memfit") / "applied"


class State(StrEnum):
    """Say how far an apply has come; whatever is not done is put back."""

    WRITING = "writing"
    DONE = "done"
    UNDOING = "undoing"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of an apply; paths are relative to the folder."""

    path: str
    backup: str
    part: str
    """The new content, until it takes the file's place."""
    before: str
    """The checksum of the content before."""
    after: str
    mode: int
    modified_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One apply."""

    number: int
    state: State
    files: tuple[FileRecord, ...]

    def in_state(self, state: State) -> Self:
        """Return the record in another state."""
        return replace(self, state=state)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Read what ``save`` has written."""
        return cls(
            number=int(content["number"]),
            state=State(content["state"]),
            files=tuple(FileRecord(**each) for each in content["files"]),
        )


def checksum(content: bytes) -> str:
    """Sum up a content."""
    return hashlib.sha256(content).hexdigest()


def save(folder: Path, record: Record) -> None:
    """Write a record, whole or not at all."""
    make_folders(folder / HISTORY)
    content = json.dumps(asdict(record), indent=2) + "\n"
    write_whole(_file(folder, record.number), content.encode())


def forget(folder: Path, record: Record) -> None:
    """Remove a record."""
    remove(_file(folder, record.number))


def records(folder: Path) -> list[Record]:
    """Read all records of a folder, the latest last.

    Raises:
        UndoError: if one cannot be read.
    """
    return sorted(_read_all(folder / HISTORY), key=lambda record: record.number)


def folder_with_history(path: Path) -> Path | None:
    """Find the folder whose history a path belongs to: itself, or the nearest above."""
    start = path.absolute() if path.is_dir() else path.absolute().parent
    return next((each for each in (start, *start.parents) if records(each)), None)


def _read_all(folder: Path) -> Iterator[Record]:
    for file in folder.glob("*.json"):
        try:
            yield Record.from_json(parsed_json(file.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UndoError(
                f"{file} cannot be read ({type(error).__name__}: {error}). The backups lie beside "
                "the files; put them back by hand and remove this one."
            ) from None


def _file(folder: Path, number: int) -> Path:
    return folder / HISTORY / f"{number:04d}.json"
