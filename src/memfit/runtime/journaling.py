"""Decides who is told of a run: its folder, its listeners, and a watch from outside."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from memfit.journal.folder import PLAN_NAME, WATCH_FOLDER_VARIABLE, JournalWriter, rank_folder
from memfit.journal.records import Ending, Event, LeakEvent, RunFacts, StepRecord
from memfit.journal.timeline import StepTimeline, write_timeline
from memfit.listeners.collection import Listeners
from memfit.listeners.journal import JournalListener
from memfit.listeners.protocol import StepListener
from memfit.runtime.events import RunNotes
from memfit.runtime.guard.ranks import Ranks
from memfit.runtime.planned_steps import PlannedSteps
from memfit.strategies.plan import Plan


class FolderKeeper:
    """Keep plan and timeline in a run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep_plan(self, plan: Plan) -> None:
        """Write ``plan.yaml``."""
        plan.save(self._folder / PLAN_NAME)

    def keep_timeline(self, timeline: StepTimeline) -> None:
        """Write ``timeline.json``."""
        write_timeline(self._folder, timeline)


def begun_notes(
    steps: PlannedSteps,
    ranks: Ranks,
    folder: str | Path | None,
    listeners: Iterable[StepListener],
    *,
    finds_leaks: bool,
) -> RunNotes:
    """Tell everybody what is run, and give what tells them the rest."""
    told = Listeners(listeners)
    keeper = None
    if folder is not None:
        told.add(JournalListener(folder))
        keeper = FolderKeeper(rank_folder(Path(folder), ranks.rank))
    notes = RunNotes(told, keeper=keeper, finds_leaks=finds_leaks)
    notes.begin(_facts(steps, ranks, finds_leaks=finds_leaks))
    watched = os.environ.get(WATCH_FOLDER_VARIABLE)
    if watched:
        told.add(_EventsForWatch(rank_folder(Path(watched), ranks.rank)))
    return notes


class _EventsForWatch:
    """Write what the guard does where a watch from outside keeps its journal.

    The watch sees steps and looks for leaks by itself.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = JournalWriter(folder)

    def begin(self, facts: RunFacts) -> None:
        """Do nothing: the watch has noted what is run."""

    def step(self, record: StepRecord) -> None:
        """Do nothing."""

    def event(self, event: Event) -> None:
        """Write what the watch does not find itself."""
        if not isinstance(event, LeakEvent):
            self._writer.event(event)

    def end(self, ending: Ending | None) -> None:
        """Close the file; the watch tells how the command ended."""
        del ending
        self._writer.close()


def _facts(steps: PlannedSteps, ranks: Ranks, *, finds_leaks: bool) -> RunFacts:
    prediction = steps.plan.prediction
    return RunFacts(
        title=Path(sys.argv[0]).stem or "run",
        command=shlex.join(sys.argv),
        device=steps.session.device_type,
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        process_id=os.getpid(),
        host_name=socket.gethostname(),
        rank=ranks.rank,
        num_ranks=ranks.num_ranks,
        budget_bytes=prediction.budget_bytes if prediction else None,
        strategies=steps.plan.labels(),
        finds_leaks=finds_leaks,
    )
