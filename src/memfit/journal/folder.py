"""Writes a journal into a run folder line by line, and reads it back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from memfit.errors import DataError, UsageError
from memfit.files import write_atomically

from .lines import LineFile, read_rows
from .plain_text import parsed_json, read_written
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
    UnprovedPlanEvent,
)
from .step_file import StepFile, read_steps
from .typed_records import record_of

_R = TypeVar("_R")
_EVENTS: Mapping[str, type[Event]] = {
    "out-of-memory": OutOfMemoryEvent,
    "plan-climbed": PlanClimbedEvent,
    "drift": DriftEvent,
    "leak": LeakEvent,
    "unproved-plan": UnprovedPlanEvent,
}
"""The word in the file for each kind of event."""
FACTS_NAME, STEPS_NAME, EVENTS_NAME, REASON_NAME = (
    "run.json",
    "steps.jsonl",
    "events.jsonl",
    "reason.json",
)

WATCH_FOLDER_VARIABLE = "MEMFIT_WATCH_FOLDER"
"""In the environment of a command that ``memfit run`` watches: where its journal is."""
PLAN_NAME = "plan.yaml"
"""Beside the journal: the plan in force."""
TIMELINE_NAME = "timeline.json"
"""The timeline of one step."""
REFUSE, OVERWRITE, CONTINUE = EARLIER_RUN = ("refuse", "overwrite", "continue")
"""What to do with a run that lies in the folder of a new one."""
JOURNAL_NAMES = (FACTS_NAME, STEPS_NAME, EVENTS_NAME, REASON_NAME)
NO_JOURNAL = f"it holds no journal: neither {FACTS_NAME}, {STEPS_NAME} nor {REASON_NAME}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """A journal as it was read; what is missing or was cut off in a file is left out."""

    folder: Path
    facts: RunFacts | None
    steps: tuple[StepRecord, ...]
    events: tuple[Event, ...]
    ending: Ending | None


class JournalWriter:
    """Append to the journal in a folder; a line is whole in its file before the next begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._steps: StepFile | None = None
        self._events: LineFile | None = None

    def begin(self, facts: RunFacts) -> None:
        """Write what is run; how an earlier run in the folder ended is not how this one does."""
        (self.folder / REASON_NAME).unlink(missing_ok=True)
        write_atomically(self.folder / FACTS_NAME, json.dumps(asdict(facts), indent=2) + "\n")

    def step(self, record: StepRecord) -> None:
        """Add a step."""
        if self._steps is None:
            self._steps = StepFile(self.folder / STEPS_NAME)
        self._steps.add(record)

    def event(self, event: Event) -> None:
        """Add an event."""
        if self._events is None:
            self._events = LineFile(self.folder / EVENTS_NAME)
        word = next(word for word, kind in _EVENTS.items() if type(event) is kind)
        self._events.add(json.dumps({"event": word, **asdict(event)}) + "\n")

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
    """Return where a rank writes."""
    return folder if rank == 0 else folder / f"rank-{rank}"


def read_journal(folder: Path) -> Journal:
    """Read a journal, also of a run that is still going or was killed.

    Raises:
        DataError: if there is no journal in the folder.
    """
    if not holds_journal(folder):
        raise DataError(str(folder), NO_JOURNAL)
    facts, ending = _read_json(folder / FACTS_NAME), _read_json(folder / REASON_NAME)
    events = (_event(row) for row in read_rows(folder / EVENTS_NAME))
    return Journal(
        folder=folder,
        facts=None if facts is None else _whole(folder / FACTS_NAME, RunFacts, facts),
        steps=read_steps(folder / STEPS_NAME),
        events=tuple(event for event in events if event is not None),
        ending=None if ending is None else _ending(folder / REASON_NAME, ending),
    )


def holds_journal(folder: Path) -> bool:
    """Return whether a run has written a journal into a folder."""
    return any((folder / name).is_file() for name in JOURNAL_NAMES)


def check_earlier_run(folder: Path, earlier_run: str, advice: str) -> None:
    """Refuse a folder in which another run lies that is neither to be replaced nor continued.

    Args:
        folder: that of one rank.
        earlier_run: one of ``EARLIER_RUN``.
        advice: what to do instead, a sentence.

    Raises:
        UsageError: if it holds a run, or ``earlier_run`` is none of the words for it.
    """
    if earlier_run not in EARLIER_RUN:
        choice = ", ".join(map(repr, EARLIER_RUN))
        msg = f"earlier_run must be one of {choice}, not {earlier_run!r}."
        raise UsageError(msg)
    found = [name for name in JOURNAL_NAMES if (folder / name).is_file()]
    if found and earlier_run == REFUSE:
        raise UsageError(f"{folder} holds a run already ({found[0]}). {advice}")
    if earlier_run == OVERWRITE and not has_own_facts(folder):
        msg = (
            f"{folder / FACTS_NAME} is in the way, and no run of memfit has written it: it is not "
            "replaced. Move it, or give another folder."
        )
        raise UsageError(msg)


def has_own_facts(folder: Path) -> bool:
    """Return whether the facts of a run in a folder are memfit's, or are not there at all."""
    try:
        facts = _read_json(folder / FACTS_NAME)
    except DataError:
        return False
    return facts is None or record_of(RunFacts, facts) is not None


def clear_journal(folder: Path, *, num_ranks: int = 1) -> None:
    """Remove the journal of an earlier run and its timeline; all else stays, a saved plan too.

    Args:
        folder: that of the whole run, or of a rank.
        num_ranks: how many ranks begin anew; each of them clears its own folder.
    """
    later = [path for path in folder.glob("rank-*") if _rank_of(path) >= num_ranks]
    for each in (folder, *later):
        for name in (*JOURNAL_NAMES, TIMELINE_NAME):
            (each / name).unlink(missing_ok=True)


def _rank_of(path: Path) -> int:
    """Return the rank whose folder it is; -1 if it is another folder."""
    number = path.name.removeprefix("rank-")
    return int(number) if number.isdecimal() else -1


def read_ranks(folder: Path) -> dict[int, Journal]:
    """Read the journals of all ranks in a run folder, by rank; the first may have left none.

    Raises:
        DataError: if there is none.
    """
    journals = {0: read_journal(folder)} if holds_journal(folder) else {}
    for path in folder.glob("rank-*"):
        if (rank := _rank_of(path)) >= 0 and holds_journal(path):
            journals[rank] = read_journal(path)
    if not journals:
        raise DataError(str(folder), NO_JOURNAL)
    return dict(sorted(journals.items()))


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    text = read_written(path)
    try:
        value = parsed_json(text)
    except ValueError as error:
        reason = f"it is not JSON: {error}"
        raise DataError(str(path), reason) from error
    if not isinstance(value, dict):
        reason = f"it holds a {type(value).__name__} instead of a JSON object"
        raise DataError(str(path), reason)
    return value


def _whole(path: Path, kind: type[_R], row: Mapping[str, Any]) -> _R:
    record = record_of(kind, row)
    if record is None:
        reason = f"it does not have the fields of {kind.__name__}"
        raise DataError(str(path), reason)
    return record


def _event(row: Mapping[str, Any]) -> Event | None:
    """Make an event; None for a kind that this version does not know."""
    word = row.get("event")
    kind = _EVENTS.get(word) if isinstance(word, str) else None
    return None if kind is None else record_of(kind, row)


def _ending(path: Path, row: Mapping[str, Any]) -> Ending:
    try:
        reason = Reason(str(row.get("reason", "")))
    except ValueError as error:
        raise DataError(str(path), str(error)) from None
    told = row.get("leaks")
    rows = [each for each in told if isinstance(each, dict)] if isinstance(told, list) else []
    known = tuple(leak for each in rows if (leak := record_of(LeakEvent, each)) is not None)
    return _whole(path, Ending, {**row, "reason": reason, "leaks": known})
