"""The journal of one rank, which one process at a time may write."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from memfit.journal.folder import STEPS_NAME, JournalWriter, rank_folder, read_journal
from memfit.journal.records import LeakEvent, StepRecord
from memfit.journal.step_file import read_steps
from memfit.observe.processes import started_at
from memfit.watch.last_words import words_folder


class RankTakenError(Exception):
    """Say that another process writes the journal of the same rank."""


class RankJournal:
    """Claim the journal of a rank and write to it.

    Where a command runs one training after the other, the second goes on in the journal of the
    first, with step numbers that go on as well.

    Raises:
        RankTakenError: if another living process has the rank.
    """

    def __init__(self, folder: Path, rank: int, num_ranks: int, device: str) -> None:
        _claim(words_folder(folder) / f"rank-{rank}.claim")
        run = read_journal(folder).facts
        assert run is not None, "written before the command was started"
        facts = replace(run, device=device, rank=rank, num_ranks=num_ranks, process_id=os.getpid())
        own_folder = rank_folder(folder, rank)
        self._began_seconds = datetime.fromisoformat(run.started_at).timestamp()
        before = read_steps(own_folder / STEPS_NAME)
        self._num_steps_before = before[-1].step if before else 0
        self._writer = JournalWriter(own_folder)
        self._writer.begin(facts)

    def number(self, step: int) -> int:
        """Return the number of a step of this process in the journal."""
        return step + self._num_steps_before

    def step(self, record: StepRecord) -> None:
        """Write a step, with the time since the command began."""
        self._writer.step(
            replace(
                record,
                step=self.number(record.step),
                time_seconds=round(time.time() - self._began_seconds, 4),
                step_seconds=round(record.step_seconds, 6),
            )
        )

    def leak(self, event: LeakEvent) -> None:
        """Write a leak."""
        self._writer.event(replace(event, step=self.number(event.step)))

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


def _claim(path: Path) -> None:
    """Make the file that says whose the rank is, or take it over from a process that is gone.

    Raises:
        RankTakenError: if its process is alive.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        return
    except FileExistsError:
        owner = path.read_text("utf-8")
    if owner.isdecimal() and started_at(int(owner)) is not None:
        raise RankTakenError(owner)
    path.write_text(str(os.getpid()), "utf-8")
