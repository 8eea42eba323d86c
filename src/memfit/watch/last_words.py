"""What each watched process leaves behind about itself, for the outer half to tell the end from.

A file per process, in ``.watch`` of the run folder. It is written when torch has been imported,
again with the first step, and last when the process ends in an orderly way. A process without an
orderly end was killed, or left by ``os._exit``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from memfit.files import write_atomically
from memfit.journal.records import Reason

_FOLDER_NAME = ".watch"
WORDS = re.compile(r"\d+\.(json|failed)|rank-\d+\.claim|\.\d+\.json\..*\.part")
"""What processes leave there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorWords:
    """An error, and where it was raised."""

    failure: Reason
    """What kind of error it is."""
    type_name: str
    message: str
    """The first line."""
    noted_at_seconds: float
    """Since the epoch."""
    step: int
    """How many steps were done before it."""
    is_uncaught: bool
    """Whether the script let it pass; a caught error may have ended it all the same."""
    is_handed_on: bool = False
    """Whether it tells of an error in another process, as torch.multiprocessing does."""
    thread: str = ""
    """Empty for the main one."""
    place: str = ""
    """``train.py:12``, the last line of the script's own code."""
    phase: str = ""
    """``forward``, ``backward`` or ``update``; empty where not known."""
    module: str = ""
    """The innermost module that was being run, as ``encoder.0 (Linear)``."""
    operator: str = ""
    wanted_bytes: int | None = None
    live_bytes: int | None = None
    child_signal: int | None = None
    """The signal that ended processes of a launcher, if it said so."""
    child_ids: tuple[int, ...] = ()
    """These processes, as far as it named them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What is known of a process."""

    process_id: int
    started_ticks: int | None = None
    """When it was started, which tells it from a later one with the same id."""
    rank: int | None = None
    """None before the first step."""
    has_ended: bool = False
    """Whether it came to an orderly end."""
    highest_bytes: int | None = None
    """Under an enforced budget: the most that was alive at once."""
    errors: tuple[ErrorWords, ...] = ()
    is_planned: bool = False
    """Whether a trainer began under a plan, or was to."""
    unplanned: str = ""
    """Why a training that was to be planned is not."""
    notes: tuple[str, ...] = ()
    """What could not be watched, and why."""


def words_folder(folder: Path) -> Path:
    """Return where processes leave their words in a run folder."""
    return folder / _FOLDER_NAME


def write_words(folder: Path, words: LastWords) -> None:
    """Write the words of a process, in place of earlier ones."""
    path = words_folder(folder) / f"{words.process_id}.json"
    write_atomically(path, json.dumps(asdict(words)) + "\n")


def read_words(folder: Path) -> tuple[LastWords, ...]:
    """Read the words of all processes, by their ids."""
    paths = sorted(words_folder(folder).glob("*.json"), key=lambda path: int(path.stem))
    return tuple(_words(json.loads(path.read_text("utf-8"))) for path in paths)


def read_failures(folder: Path) -> tuple[str, ...]:
    """Read why processes could not be attached."""
    paths = sorted(words_folder(folder).glob("*.failed"))
    return tuple(dict.fromkeys(_failures(paths)))


def _failures(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        yield path.read_text("utf-8").partition("\n")[0]


def _words(row: dict[str, Any]) -> LastWords:
    errors = tuple(_error(error) for error in row["errors"])
    return LastWords(**{**_known(LastWords, row), "errors": errors, "notes": tuple(row["notes"])})


def _error(row: dict[str, Any]) -> ErrorWords:
    child_ids = tuple(row["child_ids"])
    known = _known(ErrorWords, row)
    return ErrorWords(**{**known, "failure": Reason(row["failure"]), "child_ids": child_ids})


def _known(kind: type, row: dict[str, Any]) -> dict[str, Any]:
    """Keep the fields that this version knows: the script's Python may have another one."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in row.items() if name in names}
