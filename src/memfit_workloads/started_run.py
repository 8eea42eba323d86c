"""Starts the run of a system: guarded, with a journal, and with its events on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memfit.journal.sentences import event_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from memfit import Job, Run

    from .planned_memory import PlannedMemory


def started_run(job: Job, planned_memory: PlannedMemory, folder: Path, console: Console) -> Run:
    """Start a run under its plan; say on the terminal whenever it had to be recovered."""
    import memfit

    plan, device = planned_memory.plan, planned_memory.run_device
    run = memfit.start(job, plan, device=device, folder=folder)
    run.listen(lambda event: console.print(event_sentence(event), soft_wrap=True, markup=False))
    return run
