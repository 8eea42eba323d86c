"""Turns the steps and batches of a script into its journal, and asks the leak finder about them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import profiler

from memfit.journal.folder import STEPS_NAME, JournalWriter, rank_folder, read_journal
from memfit.journal.records import Ending, Event, LeakEvent, RunFacts, StepRecord
from memfit.journal.step_file import read_steps
from memfit.observe.observer import TRAINING, StepObserver
from memfit.observe.peaks import CpuPeaks, CudaPeaks, Peaks
from memfit.observe.processes import started_at
from memfit.session.leaves import bytes_in
from memfit.watch.last_words import words_folder
from memfit.watch.settings import WatchSettings

from .budgets import BudgetPeaks, WatchedBudget
from .loaders import Loaders
from .process_record import ProcessRecord
from .step_ends import StepEnds, is_inside_own_step

_PEAKS_FRACTION = 0.001
"""Of the time, for watching steps on the CPU."""
_LEAKS_FRACTION = 0.002
"""Of the time, for looking for leaks. The hooks take the rest of one hundredth."""


class ScriptWatch:
    """Follow a script from step to step, have an observer look at them, and write its journal.

    Whatever goes wrong in here ends the watching, is noted, and does not reach the script.
    """

    def __init__(
        self, settings: WatchSettings, record: ProcessRecord, budget: WatchedBudget | None
    ) -> None:
        self._settings = settings
        self._record = record
        self._budget = budget
        self._ends = StepEnds()
        self._loaders = Loaders()
        self._observer = StepObserver(
            leaks_fraction=_LEAKS_FRACTION if settings.finds_leaks else None,
            main_thread_only=True,
            warns=False,
            leaks_given_up=self._leaks_given_up,
            told=self,
        )
        self._has_peaks = False
        self._journal: RankJournal | None = None
        self._thread: int | None = None
        self._ended_seconds = self._began_seconds = time.perf_counter()
        self._has_begun_anew = False
        self._batch_bytes = 0
        self.num_steps = 0
        self.is_off = False

    # --- What the hooks call ---

    def optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End a step where this optimizer ends one."""
        del args, kwargs
        self.safely(self._optimizer_stepped, optimizer)

    def loader_begun(self, iterator: Any, loader: Any, frame: FrameType) -> None:
        """Learn of a pass over a loader."""
        self.safely(self._loader_begun, iterator, loader, frame)

    def batch_wanted(self, iterator: Any) -> None:
        """Note that the script is between two batches."""
        self.safely(self._batch_wanted, iterator)

    def batch_given(self, iterator: Any, batch: Any) -> None:
        """Note how large a batch is."""
        del iterator
        self.safely(self._batch_given, batch)

    def leave(self) -> None:
        """Do nothing more in this process: it is a child that has copied all this."""
        self.is_off = True
        if self._budget is not None:
            self._budget.is_off = True

    def finish(self) -> None:
        """Say the last that there is to say."""
        self.safely(self._observer.close)
        if self._observer.peaks.given_up and not self.is_off:
            self._record.note(f"peaks were measured no more: {self._observer.peaks.given_up}")
        if self._journal is not None:
            self._journal.close()

    def safely(self, act: Callable[..., object], *args: Any) -> None:
        """Do something, or note why it cannot be done and watch no more."""
        if self.is_off:
            return
        try:
            act(*args)
        except Exception as error:  # noqa: BLE001 - whatever fails must not reach the script
            self.leave_watching(f"watching ended: {type(error).__name__}: {error}")

    def leave_watching(self, reason: str) -> None:
        """Watch no more; a budget stays in force."""
        self.is_off = True
        self._record.note(reason)
        with contextlib.suppress(Exception):  # what ends watching may be what fails here
            self._observer.abandon()

    # --- Steps ---

    def _optimizer_stepped(self, optimizer: Any) -> None:
        if is_inside_own_step(optimizer) or not self._is_own_thread() or is_recorded(optimizer):
            return
        if not self._ends.is_end(optimizer):
            return
        if not self._has_peaks:
            device = next(_devices(optimizer), torch.device("cpu"))
            self._observer.peaks, self._has_peaks = self._peaks_on(device), True
            self._enter(device)
        now_seconds = time.perf_counter()
        # The time of the step alone goes into the record; watching pays for all of its own.
        self._observer.measured(
            step_seconds=now_seconds - self._began_seconds,
            spent_seconds=now_seconds - self._ended_seconds,
        )
        self.num_steps += 1
        self._ended_seconds = now_seconds
        self._observer.end_step(self.num_steps, batch_bytes=self._batch_bytes or None)
        self._batch_bytes, self._has_begun_anew = 0, False
        if self._ends.has_new_leader:
            self._observer.peaks.begin_training()
        self._observer.begin_step(batch_bytes=0)
        self._began_seconds = time.perf_counter()

    # --- What the observer calls ---

    def begin(self, facts: RunFacts) -> None:
        """Do nothing: the journal has its facts from outside."""

    def step(self, record: StepRecord) -> None:
        """Write a step."""
        if self._journal is not None:
            self._journal.step(record)

    def event(self, event: Event) -> None:
        """Write a leak."""
        if isinstance(event, LeakEvent):
            self._enter(torch.device("cuda" if event.place.startswith("cuda") else "cpu"))
            if self._journal is not None:
                self._journal.leak(event)

    def end(self, ending: Ending | None) -> None:
        """Do nothing: how the command has ended is told from outside."""

    def _leaks_given_up(self, failure: str) -> None:
        self._record.note(f"leaks were looked for until step {self.num_steps}: {failure}")

    def _is_own_thread(self) -> bool:
        """Return whether this is the thread that did the first step."""
        if self._thread is None:
            self._thread = threading.get_ident()
        return self._thread == threading.get_ident()

    def _enter(self, device: torch.device) -> None:
        """Enter the journal, with the first step or the first leak."""
        if self._record.words.rank is not None:
            return
        rank, num_ranks = _rank()
        self._record.update(rank=rank)
        try:
            self._journal = RankJournal(
                self._settings.folder, rank, num_ranks, _device_name(device)
            )
        except RankTakenError as error:
            self._record.note(f"not in the journal: process {error} has rank {rank} already")

    def _peaks_on(self, device: torch.device) -> Peaks:
        if device.type == "cuda":
            return CudaPeaks()
        if self._budget is not None:
            return BudgetPeaks(self._budget)
        peaks = CpuPeaks(_PEAKS_FRACTION)
        # Ranges that began in a profile of the script's must not end while another one is active.
        _before_profiles(peaks.close)
        return peaks

    # --- Batches ---

    def _loader_begun(self, iterator: Any, loader: Any, frame: FrameType) -> None:
        is_over = self._loaders.begin_pass(iterator, loader, frame, self.num_steps)
        if is_over:
            self._observer.end_of_pass(TRAINING)

    def _batch_wanted(self, iterator: Any) -> None:
        fetch = self._loaders.wanted(iterator, self.num_steps)
        if fetch.is_training:
            # What happened since the last step, such as validation, is left out of the step's time.
            if not self._has_begun_anew:
                self._has_begun_anew = True
                self._began_seconds = time.perf_counter()
        elif fetch.number > 1:
            self._observer.boundary(fetch.stream, fetch.number - 1, None)

    def _batch_given(self, batch: Any) -> None:
        # Not asked whose thread it is: a loader may be read ahead by one that does no steps.
        if not torch.is_grad_enabled() or self._thread not in {None, threading.get_ident()}:
            return
        self._batch_bytes += bytes_in(batch)
        if self._has_peaks:
            began_seconds = time.perf_counter()
            self._observer.begin_step(batch_bytes=self._batch_bytes)
            self._began_seconds += time.perf_counter() - began_seconds


def _before_profiles(give_way: Callable[[], None]) -> None:
    """Have something called before any profile is prepared or begun."""
    for name in ("_prepare_profiler", "_enable_profiler"):
        original = getattr(profiler, name, None)
        if original is not None:
            setattr(profiler, name, _preceded(original, give_way))


def _preceded(original: Callable[..., Any], give_way: Callable[[], None]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        give_way()
        return original(*args, **kwargs)

    return function


def _devices(optimizer: Any) -> Iterator[torch.device]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.device


def _device_name(device: torch.device) -> str:
    return device.type if device.index is None else f"{device.type}:{device.index}"


def _rank() -> tuple[int, int]:
    """Return the rank of this process and how many there are."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, num_ranks = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and num_ranks.isdecimal():
        return int(rank), int(num_ranks)
    return 0, 1


def is_recorded(optimizer: Any) -> bool:
    """Return whether a step computes with fake tensors: memfit looks at it, nothing is trained."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return isinstance(next(parameters, None), FakeTensor)


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
