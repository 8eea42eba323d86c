"""Writes what a run tells into its folder."""

from __future__ import annotations

from pathlib import Path

from memfit.journal.folder import JournalWriter, rank_folder
from memfit.journal.records import Ending, Event, RunFacts, StepRecord


class JournalListener:
    """Write the journal of a run into a folder; `memfit report` shows it.

    Args:
        folder: that of the whole run; ranks other than the first write into a folder in it.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer = JournalWriter(Path(folder))

    @property
    def folder(self) -> Path:
        """Return the folder."""
        return self._writer.folder

    def begin(self, facts: RunFacts) -> None:
        """Write ``run.json``."""
        if facts.rank:
            self._writer = JournalWriter(rank_folder(self._writer.folder, facts.rank))
        self._writer.begin(facts)

    def step(self, record: StepRecord) -> None:
        """Add a line to ``steps.jsonl``."""
        self._writer.step(record)

    def event(self, event: Event) -> None:
        """Add a line to ``events.jsonl``."""
        self._writer.event(event)

    def end(self, ending: Ending | None) -> None:
        """Write ``reason.json`` where it is known, and close the files."""
        if ending is None:
            self._writer.close()
        else:
            self._writer.end(ending)
