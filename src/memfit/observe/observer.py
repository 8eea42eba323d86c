"""Observes steps, whoever runs them: peaks, timeline, records, drift and leaks."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import GIVEN_UP, LostContextError, MemfitWarning
from memfit.journal.folder import PLAN_NAME
from memfit.journal.plan_words import write_plan_words
from memfit.journal.records import (
    DriftEvent,
    Ending,
    Event,
    LeakEvent,
    Reason,
    RunFacts,
    StepRecord,
    UnprovedPlanEvent,
)
from memfit.journal.sentences import event_sentence
from memfit.journal.timeline import StepTimeline, write_timeline
from memfit.observe.drift import DriftWatch
from memfit.observe.leaks import LeakFinder
from memfit.observe.out_of_memory import is_out_of_memory
from memfit.observe.peaks import Peaks, StepReading
from memfit.observe.processes import ResidentMemory
from memfit.session.leaves import bytes_in
from memfit.trace.events import Phase
from memfit.trace.owners import Owned

if TYPE_CHECKING:  # a watched script has no need of what these packages import
    from memfit.listeners.protocol import StepListener
    from memfit.strategies.plan import Plan

TRAINING = "train"
"""The stream of training steps, for the leak finder."""
LEAKS_FRACTION = 0.005
"""The share of the time for finding leaks, where steps are memfit's own."""


class StepObserver:
    """Observe steps that follow each other, and tell a listener of them.

    Call ``begin_step`` when a step begins, ``phase`` as it goes on, and ``end_step`` once it is
    done. A step that is begun anew, or dropped, is not told of.

    Args:
        peaks: measures peaks; None measures none.
        owned: lists the job's tensors, given the batch; None where they are not known.
        leaks_fraction: the share of the time for finding what keeps growing; None does not look.
        main_thread_only: whether to look for leaks from the main thread alone.
        warns: whether leaks and drifts are warnings as well.
        leaks_given_up: is told why leaks are looked for no more, instead of a warning.
        told: is told of steps and events; ``begin`` sets another one.
    """

    def __init__(
        self,
        peaks: Peaks | None = None,
        *,
        owned: Callable[[Any], Iterable[Owned]] | None = None,
        leaks_fraction: float | None = None,
        main_thread_only: bool = False,
        warns: bool = True,
        leaks_given_up: Callable[[str], None] | None = None,
        told: StepListener | None = None,
    ) -> None:
        self.peaks = peaks or Peaks()
        self._owned = owned
        self._drift = DriftWatch()
        self._leaks: LeakFinder | None = None
        if leaks_fraction is not None:
            self._leaks = LeakFinder(self.event, overhead_fraction=leaks_fraction)
        self._main_thread_only = main_thread_only
        self._warns = warns
        self._leaks_given_up = leaks_given_up or _warn_of_leaks_given_up
        self._told = told
        self._folder: Path | None = None
        self._plan: Plan | None = None
        self._resident = ResidentMemory()
        self._listening: list[Callable[[Event], None]] = []
        self._began_seconds = self._step_began_seconds = time.perf_counter()
        self._is_measuring = False
        self.reading = StepReading()
        """Of the latest step that was measured."""
        self._highest_bytes: int | None = None
        self._found_leaks: list[LeakEvent] = []
        self._num_steps = 0
        self._failure: tuple[Reason, int, str] | None = None
        self._has_ended = False

    def begin(self, facts: RunFacts, told: StepListener, folder: Path | None = None) -> None:
        """Tell what is run.

        Args:
            facts: what is run.
            told: is told of everything from here on.
            folder: where the plan in force and the timeline of a step are kept; None keeps neither.
        """
        self._told, self._folder = told, folder
        atexit.register(self._close_at_exit)
        told.begin(facts)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Tell of events from here on."""
        self._listening.append(listener)

    # --- A step ---

    def begin_step(self, batch: Any = None, *, batch_bytes: int | None = None) -> None:
        """Begin a step, or learn in the course of one how large its batch is.

        Args:
            batch: of the step, as it lies on the device; None where it is not known.
            batch_bytes: its size, where it alone is known.
        """
        self._step_began_seconds = time.perf_counter()
        self._is_measuring = True
        if batch_bytes is None:
            batch_bytes = bytes_in(batch)
        self.peaks.begin(batch_bytes, None if self._owned is None else self._owned(batch))

    def phase(self, phase: Phase) -> None:
        """Note that a phase of the step begins."""
        self.peaks.phase(phase)

    def measured(
        self, *, step_seconds: float | None = None, spent_seconds: float | None = None
    ) -> StepReading:
        """End measuring a step; what is done from here to ``end_step`` is not a part of it.

        Args:
            step_seconds: how long it took; None takes the time since ``begin_step``.
            spent_seconds: with what was spent on it besides; None takes the same.
        """
        reading = self.peaks.end()
        seconds = time.perf_counter() - self._step_began_seconds
        reading.step_seconds = seconds if step_seconds is None else step_seconds
        self.peaks.account(reading, seconds if spent_seconds is None else spent_seconds)
        self.reading, self._is_measuring = reading, False
        return reading

    def drop_step(self) -> None:
        """End a step that has failed; it is told of no more."""
        self.peaks.drop()
        self._is_measuring = False

    @contextmanager
    def measuring(self, batch: Any) -> Iterator[None]:
        """Measure the step inside."""
        self.begin_step(batch)
        try:
            yield
        except BaseException:
            self.drop_step()
            raise
        self.measured()

    def end_step(
        self,
        number: int,
        batch: Any = None,
        *,
        batch_bytes: int | None = None,
        plan: Plan | None = None,
        num_samples: int | None = None,
        micro_batch_size: int | None = None,
    ) -> StepReading:
        """Tell of a step that is done, see whether its peak is the one predicted, look for leaks.

        Args:
            number: of the step, from 1.
            batch: of the step.
            batch_bytes: its size, where it alone is known.
            plan: that it was run under.
            num_samples: in its batch.
            micro_batch_size: how many of them were computed at a time.
        """
        reading = self.measured() if self._is_measuring else self.reading
        self._num_steps, self._failure = number, None
        self._keep_files(plan)
        prediction = None if plan is None else plan.prediction
        peak = reading.measured_peak_bytes
        if peak is not None:
            self._highest_bytes = max(peak, self._highest_bytes or 0)
        if self._told is not None:
            self._told.step(
                StepRecord(
                    step=number,
                    time_seconds=time.perf_counter() - self._began_seconds,
                    step_seconds=reading.step_seconds,
                    peak_allocated_bytes=peak,
                    peak_reserved_bytes=reading.reserved_peak_bytes,
                    predicted_peak_bytes=prediction.peak_allocated_bytes if prediction else None,
                    allocator_retries=reading.allocator_retries,
                    host_bytes=self._resident.num_bytes(),
                    micro_batch_size=micro_batch_size,
                    num_samples=num_samples,
                )
            )
        if self._owned is not None:
            drift = self._drift.check(number, prediction, peak, self._owned(batch))
            if drift is not None:
                self.event(drift)
        self.boundary(TRAINING, number, bytes_in(batch) if batch_bytes is None else batch_bytes)
        return reading

    # --- Leaks ---

    @property
    def finds_leaks(self) -> bool:
        """Return whether leaks are looked for."""
        return self._leaks is not None

    def boundary(self, stream: str, number: int, batch_bytes: int | None) -> None:
        """Look for leaks between two steps of a stream, such as training or an evaluation."""
        is_elsewhere = threading.current_thread() is not threading.main_thread()
        if self._leaks is None or (self._main_thread_only and is_elsewhere):
            return
        self._leaks.boundary(stream, number, batch_bytes)
        if self._leaks.failure is not None:
            failure, self._leaks = self._leaks.failure, None
            self._leaks_given_up(failure)

    def evaluated(self, batch: Any) -> None:
        """Note that a batch was evaluated."""
        self.boundary("evaluation", self._num_steps, bytes_in(batch))

    def end_of_pass(self, stream: str) -> None:
        """Note that a pass over the data of a stream is over."""
        if self._leaks is not None:
            self._leaks.end_of_pass(stream)

    # --- Events ---

    def event(self, event: Event) -> None:
        """Tell that something happened; what nobody else would do anything about is warned of."""
        for listener in self._listening:
            listener(event)
        if self._told is not None:
            self._told.event(event)
        if isinstance(event, LeakEvent):
            self._found_leaks.append(event)
        if self._warns and isinstance(event, LeakEvent | DriftEvent):
            warnings.warn(event_sentence(event), MemfitWarning, stacklevel=4)

    def event_of_next_step(self, event: UnprovedPlanEvent) -> None:
        """Tell of something that belongs to the step that has begun."""
        self.event(replace(event, step=self._num_steps + 1))

    # --- The end ---

    def failed(self, error: BaseException) -> None:
        """Note that a step failed; unless another one is run, the run has ended with it."""
        # Not the error itself, whose traceback holds the tensors of the failed attempt.
        self._failure = _ended(error, self._num_steps)
        if isinstance(error, LostContextError):
            self.close()  # what follows may not come to an end in order

    def abandon(self) -> None:
        """Observe no more, and tell nothing more than leaks that are known."""
        try:
            self.peaks.close()
        finally:
            if self._leaks is not None:
                self._leaks.abandon()

    def close(self) -> None:
        """Tell that the run is over."""
        if self._has_ended:
            return
        self._has_ended = True
        atexit.unregister(self._close_at_exit)
        self.peaks.close()
        if self._leaks is not None:
            self._leaks.finish()
        if self._told is not None:
            self._told.end(self._ending())

    def _ending(self) -> Ending:
        reason, exit_code, sentence = self._failure or _ended(None, self._num_steps)
        leaks = tuple(self._found_leaks)
        return Ending(
            reason=Reason.LEAK if leaks and reason is Reason.OUT_OF_MEMORY else reason,
            ended_by=reason.value,
            exit_code=exit_code,
            sentence=sentence,
            remedy=leaks[0].sentence if leaks else "",
            num_steps=self._num_steps,
            peak_allocated_bytes=self._highest_bytes,
            leaks=leaks,
        )

    def _close_at_exit(self) -> None:
        """Close a run that nobody has closed; Python keeps an error that nobody has caught."""
        error = getattr(sys, "last_value", None)
        if self._failure is None and isinstance(error, BaseException):
            self._failure = _ended(error, self._num_steps)
        self.close()

    def _keep_files(self, plan: Plan | None) -> None:
        """Keep the plan whenever it has changed, and the timeline of a step once."""
        timeline = self.peaks.taken_timeline()
        if self._folder is None:
            return
        try:
            if plan is not None and plan is not self._plan:
                self._plan = plan
                plan.save(self._folder / PLAN_NAME)
                write_plan_words(self._folder, plan.in_words())
            if timeline is not None:
                prediction = None if plan is None else plan.prediction
                predicted = None if prediction is None else prediction.timeline
                kept = StepTimeline(step=self._num_steps, measured=timeline, predicted=predicted)
                write_timeline(self._folder, kept)
        except OSError as error:  # a full disk is no reason to stop training
            self._folder = None
            msg = f"Plan and timeline are kept no more ({error}); training goes on."
            warnings.warn(msg, MemfitWarning, stacklevel=4)


def _warn_of_leaks_given_up(failure: str) -> None:
    msg = f"Leaks are looked for no more ({failure}); training goes on."
    warnings.warn(msg, MemfitWarning, stacklevel=5)


def _ended(failure: BaseException | None, num_steps: int) -> tuple[Reason, int, str]:
    """Return reason, exit code and sentence of a run's end."""
    if failure is None:
        return Reason.DONE, 0, f"{num_steps} steps were run."
    if isinstance(failure, KeyboardInterrupt):
        return Reason.INTERRUPTED, 130, f"Interrupted after {num_steps} steps."
    reason = Reason.ERROR
    if isinstance(failure, LostContextError):
        reason = Reason.LOST_CONTEXT
    elif isinstance(failure, GIVEN_UP) or is_out_of_memory(failure):
        reason = Reason.OUT_OF_MEMORY
    sentence = str(failure) or type(failure).__name__
    return reason, int(getattr(failure, "exit_code", 1)), sentence
