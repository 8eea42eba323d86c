"""Writes a journal into a run folder line by line, and reads it back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

from memfit.errors import DataError
from memfit.files import write_atomically

from .records import (
    DriftEvent,
    Ending,
    Event,
    LeakEvent,
    OutOfMemoryEvent,
    PlanClimbedEvent,
    Reason,
    RunFacts,
    StepRecord,
)

_EVENTS: Mapping[str, type[Event]] = {
    "out-of-memory": OutOfMemoryEvent,
    "plan-climbed": PlanClimbedEvent,
    "drift": DriftEvent,
    "leak": LeakEvent,
}
"""The word in the file for each kind of event."""
_STEP_FIELDS = tuple(field.name for field in fields(StepRecord))
FACTS_NAME, STEPS_NAME, EVENTS_NAME, REASON_NAME = (
    "run.json",
    "steps.jsonl",
    "events.jsonl",
    "reason.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A journal as it was read; what is missing or was cut off in a file is left out."""

    folder: Path
    facts: RunFacts | None
    steps: tuple[StepRecord, ...]
    events: tuple[Event, ...]
    ending: Ending | None


class JournalWriter:
    """Append to the journal in a folder; a line is whole on the disk before the next begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._steps: IO[str] | None = None
        self._events: IO[str] | None = None

    def begin(self, facts: RunFacts) -> None:
        """Write what is run."""
        write_atomically(self.folder / FACTS_NAME, json.dumps(asdict(facts), indent=2) + "\n")

    def step(self, record: StepRecord) -> None:
        """Add a step."""
        if self._steps is None:
            self._steps = (self.folder / STEPS_NAME).open("a", encoding="utf-8", buffering=1)
        # By hand, because it is done in every step: asdict and json.dumps take three times as long.
        # All fields are finite numbers, which JSON writes as Python does.
        parts = [
            f'"{name}": {value!r}'
            for name in _STEP_FIELDS
            if (value := getattr(record, name)) is not None
        ]
        self._steps.write(f"{{{', '.join(parts)}}}\n")

    def event(self, event: Event) -> None:
        """Add an event."""
        if self._events is None:
            self._events = (self.folder / EVENTS_NAME).open("a", encoding="utf-8", buffering=1)
        word = next(word for word, kind in _EVENTS.items() if type(event) is kind)
        self._events.write(json.dumps({"event": word, **asdict(event)}) + "\n")

    def end(self, ending: Ending) -> None:
        """Write how the run ended, and close the files."""
        write_atomically(self.folder / REASON_NAME, json.dumps(asdict(ending), indent=2) + "\n")
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in (self._steps, self._events):
            if file is not None:
                file.close()
        self._steps = self._events = None


def rank_folder(folder: Path, rank: int) -> Path:
    """Give where a rank writes."""
    return folder if rank == 0 else folder / f"rank-{rank}"


def read_journal(folder: Path) -> Journal:
    """Read a journal, also of a run that is still going or was killed.

    Raises:
        DataError: if there is no journal in the folder.
    """
    facts, ending = _read_json(folder / FACTS_NAME), _read_json(folder / REASON_NAME)
    steps = tuple(_known(StepRecord, row) for row in _rows(folder / STEPS_NAME))
    if facts is None and ending is None and not steps:
        reason = f"it holds no journal: neither {FACTS_NAME}, {STEPS_NAME} nor {REASON_NAME}"
        raise DataError(str(folder), reason)
    return Journal(
        folder=folder,
        facts=None if facts is None else _known(RunFacts, facts),
        steps=steps,
        events=tuple(_event(row) for row in _rows(folder / EVENTS_NAME)),
        ending=None if ending is None else _ending(ending),
    )


def read_ranks(folder: Path) -> dict[int, Journal]:
    """Read the journals of all ranks in a run folder, by rank.

    Raises:
        DataError: if there is none.
    """
    journals = {0: read_journal(folder)}
    for path in sorted(folder.glob("rank-*")):
        number = path.name.removeprefix("rank-")
        if number.isdecimal():
            journals[int(number)] = read_journal(path)
    return journals


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        reason = f"it is not JSON: {error}"
        raise DataError(str(path), reason) from error
    if not isinstance(value, dict):
        reason = f"it holds a {type(value).__name__} instead of a JSON object"
        raise DataError(str(path), reason)
    return value


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; the last one may have been cut off with the process."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            yield row


def _known(kind: type[Any], row: Mapping[str, Any]) -> Any:
    """Make a record of the fields that this version knows."""
    known = {name: value for name, value in row.items() if name in kind.__dataclass_fields__}
    lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    return kind(**{**known, **lists})


def _event(row: Mapping[str, Any]) -> Event:
    event: Event = _known(_EVENTS[row["event"]], row)
    return event


def _ending(row: Mapping[str, Any]) -> Ending:
    leaks = tuple(_known(LeakEvent, leak) for leak in row.get("leaks", ()))
    ending: Ending = _known(Ending, {**row, "reason": Reason(row["reason"]), "leaks": leaks})
    return ending
