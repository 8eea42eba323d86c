"""Turns the steps and batches of a script into its journal, and asks the leak finder about them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from memfit.journal.records import LeakEvent, StepRecord
from memfit.observe.host_memory import ResidentMemory
from memfit.observe.leaks import LeakFinder
from memfit.session.leaves import bytes_in
from memfit.watch.settings import WatchSettings

from .budgets import WatchedBudget
from .loaders import Loaders
from .peaks import BudgetPeaks, CpuPeaks, CudaPeaks, Peak, Peaks
from .process_record import ProcessRecord
from .rank_journal import RankJournal, RankTakenError
from .step_ends import StepEnds, is_inside_own_step

_TRAINING = "train"
"""The stream of training steps, for the leak finder."""
_LEAKS_FRACTION = 0.002
"""Of the time, for looking for leaks. Watching and the hooks take the rest of one hundredth."""


class ScriptWatch:
    """Follow a script from step to step.

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
        self._leaks: LeakFinder | None = None
        if settings.finds_leaks:
            self._leaks = LeakFinder(self._leaked, overhead_fraction=_LEAKS_FRACTION)
        self._peaks: Peaks | None = None
        self._journal: RankJournal | None = None
        self._resident = ResidentMemory()
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
        if self._peaks is not None:
            self.safely(self._peaks.close)
        if self._leaks is not None:
            self.safely(self._leaks.finish)
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
        for end in (
            None if self._peaks is None else self._peaks.close,
            None if self._leaks is None else self._leaks.abandon,
        ):
            if end is not None:
                with contextlib.suppress(Exception):  # what ends watching may be what fails here
                    end()

    # --- Steps ---

    def _optimizer_stepped(self, optimizer: Any) -> None:
        if is_inside_own_step(optimizer) or not self._is_own_thread():
            return
        if not self._ends.is_end(optimizer):
            return
        if self._peaks is None:
            device = _device_of(optimizer)
            self._peaks = self._peaks_on(device)
            self._enter(device)
        now_seconds = time.perf_counter()
        # The time of the step alone goes into the record; watching pays for all of its own.
        peak = self._peaks.end(now_seconds - self._ended_seconds)
        self.num_steps += 1
        if self._journal is not None:
            self._write_step(self._journal, now_seconds - self._began_seconds, peak)
        self._ended_seconds = now_seconds
        self._boundary(_TRAINING, self.num_steps, self._batch_bytes or None)
        self._batch_bytes, self._has_begun_anew = 0, False
        self._peaks.begin(0)
        self._began_seconds = time.perf_counter()

    def _write_step(self, journal: RankJournal, step_seconds: float, peak: Peak) -> None:
        record = StepRecord(
            step=journal.number(self.num_steps),
            time_seconds=journal.seconds(),
            step_seconds=round(step_seconds, 6),
            peak_allocated_bytes=peak.allocated_bytes,
            peak_reserved_bytes=peak.reserved_bytes,
            allocator_retries=peak.allocator_retries,
            host_bytes=self._resident.num_bytes(),
        )
        journal.step(record)

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
        return CpuPeaks() if self._budget is None else BudgetPeaks(self._budget)

    # --- Batches ---

    def _loader_begun(self, iterator: Any, loader: Any, frame: FrameType) -> None:
        is_over = self._loaders.begin_pass(iterator, loader, frame, self.num_steps)
        if is_over and self._leaks is not None:
            self._leaks.end_of_pass(_TRAINING)

    def _batch_wanted(self, iterator: Any) -> None:
        fetch = self._loaders.wanted(iterator, self.num_steps)
        if fetch.is_training:
            self._begin_step()
        elif fetch.number > 1:
            self._boundary(fetch.stream, fetch.number - 1, None)

    def _begin_step(self) -> None:
        """Leave what happened since the last step, such as validation, out of the step's time."""
        if not self._has_begun_anew:
            self._has_begun_anew = True
            self._began_seconds = time.perf_counter()

    def _batch_given(self, batch: Any) -> None:
        # Not asked whose thread it is: a loader may be read ahead by one that does no steps.
        if not torch.is_grad_enabled() or self._thread not in {None, threading.get_ident()}:
            return
        self._batch_bytes += bytes_in(batch)
        if self._peaks is not None:
            began_seconds = time.perf_counter()
            self._peaks.begin(self._batch_bytes)
            self._began_seconds += time.perf_counter() - began_seconds

    # --- Leaks ---

    def _boundary(self, stream: str, step: int, num_bytes: int | None) -> None:
        if self._leaks is None or threading.current_thread() is not threading.main_thread():
            return
        self._leaks.boundary(stream, step, num_bytes)
        if self._leaks.failure is not None:
            self._record.note(f"leaks were looked for until step {step}: {self._leaks.failure}")
            self._leaks = None

    def _leaked(self, event: LeakEvent) -> None:
        is_on_card = event.place.startswith("cuda")
        self._enter(torch.device("cuda" if is_on_card else "cpu"))
        if self._journal is not None:
            self._journal.leak(event)


def _devices(optimizer: Any) -> Iterator[torch.device]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.device


def _device_of(optimizer: Any) -> torch.device:
    return next(_devices(optimizer), torch.device("cpu"))


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
