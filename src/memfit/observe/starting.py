"""Starts to observe a run: what is run, who is told of it, and where its files go."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Iterable
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

from memfit.journal.folder import (
    CONTINUE,
    OVERWRITE,
    REFUSE,
    WATCH_FOLDER_VARIABLE,
    JournalWriter,
    check_earlier_run,
    clear_journal,
    rank_folder,
)
from memfit.journal.records import Ending, Event, LeakEvent, RunFacts, StepRecord
from memfit.listeners.collection import Listeners
from memfit.listeners.journal import JournalListener
from memfit.listeners.protocol import StepListener
from memfit.observe.observer import LEAKS_FRACTION, StepObserver
from memfit.observe.peaks import peaks_on
from memfit.session.storages import owned_tensors
from memfit.strategies.plan import Plan

_ADVICE = (
    f"Give another folder, replace it with earlier_run={OVERWRITE!r}, or go on in it with "
    f"earlier_run={CONTINUE!r}, after load_state_dict."
)


def observe_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: str = "cpu",
    *,
    plan: Plan | None = None,
    folder: str | Path | None = None,
    listeners: Iterable[StepListener] = (),
    find_leaks: bool = False,
    earlier_run: str = REFUSE,
) -> StepObserver:
    """Return what observes the steps of a loop that memfit does not own, from its callbacks.

    Args:
        model: that is trained.
        optimizer: of its parameters.
        device: that they are on.
        plan: that is attached to them.
        folder: of the run's journal, the plan in force and the timeline of a step; None for none.
        listeners: who is told of steps and events.
        find_leaks: whether to look for what keeps growing.
        earlier_run: what to do with a run that lies in the folder: ``refuse``, ``overwrite`` or
            ``continue``.

    Raises:
        UsageError: if the folder holds another run, which is not to be replaced or continued.
    """
    device_type = device.partition(":")[0]
    observer = StepObserver(
        peaks_on(device_type, takes_timeline=folder is not None),
        owned=partial(owned_tensors, model, optimizer),
        leaks_fraction=LEAKS_FRACTION if find_leaks else None,
    )
    start_observing(
        observer,
        device_type,
        plan or Plan(),
        folder=folder,
        listeners=listeners,
        earlier_run=earlier_run,
    )
    return observer


def start_observing(
    observer: StepObserver,
    device_type: str,
    plan: Plan,
    *,
    folder: str | Path | None = None,
    listeners: Iterable[StepListener] = (),
    earlier_run: str = REFUSE,
) -> None:
    """Tell everybody what is run.

    Args:
        observer: tells them the rest.
        device_type: what the steps run on.
        plan: that the run begins with.
        folder: of the run's journal, the plan in force and the timeline of a step; None for none.
        listeners: who is told besides.
        earlier_run: what to do with a run that lies in the folder.

    Raises:
        UsageError: if the folder holds another run.
    """
    rank, num_ranks = rank_here()
    told, own_folder = Listeners(listeners), None
    if folder is not None:
        check_run_folder(folder, earlier_run)
        own_folder = rank_folder(Path(folder), rank)
        if earlier_run == OVERWRITE:
            clear_journal(own_folder, num_ranks=num_ranks)
        told.add(JournalListener(folder))
    watched = os.environ.get(WATCH_FOLDER_VARIABLE)
    if watched:
        told.add(_EventsForWatch(rank_folder(Path(watched), rank)))
    if not len(told):
        return
    prediction = plan.prediction
    facts = RunFacts(
        title=Path(sys.argv[0]).stem or "run",
        command=shlex.join(sys.argv),
        device=device_type,
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        process_id=os.getpid(),
        host_name=socket.gethostname(),
        rank=rank,
        num_ranks=num_ranks,
        budget_bytes=prediction.budget_bytes if prediction else None,
        strategies=plan.labels(),
        finds_leaks=observer.finds_leaks,
    )
    observer.begin(facts, told, own_folder)


def check_run_folder(folder: str | Path | None, earlier_run: str) -> None:
    """Refuse a folder that holds another run, which is not to be replaced or continued.

    Raises:
        UsageError: with what to ask for instead.
    """
    if folder is not None:
        own_folder = rank_folder(Path(folder), rank_here()[0])
        check_earlier_run(own_folder, earlier_run, _ADVICE)


def rank_here() -> tuple[int, int]:
    """Return the rank of this process and how many there are."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


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
