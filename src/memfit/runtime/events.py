"""What a Run tells of its steps to those who want to know: listeners, and warnings."""

from __future__ import annotations

import atexit
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from memfit.errors import GIVEN_UP, LostContextError, MemfitWarning
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
from memfit.journal.timeline import StepTimeline
from memfit.listeners.collection import Listeners
from memfit.observe.drift import DriftWatch
from memfit.observe.host_memory import ResidentMemory
from memfit.observe.leaks import LeakFinder
from memfit.runtime.out_of_memory import is_out_of_memory
from memfit.runtime.planned_steps import Attempt, PlannedSteps
from memfit.session.leaves import bytes_in
from memfit.strategies.plan import Plan


class PlanKeeper(Protocol):
    """Something that keeps what belongs into a run folder besides the journal."""

    def keep_plan(self, plan: Plan) -> None:
        """Keep the plan in force."""

    def keep_timeline(self, timeline: StepTimeline) -> None:
        """Keep the timeline of a step."""


class RunNotes:
    """Pass steps and events on to listeners, and look for drift and leaks in between.

    Args:
        listeners: who is told.
        keeper: keeps the plan and the timeline of a step; None keeps neither.
        finds_leaks: whether to look for what keeps growing.
    """

    def __init__(
        self,
        listeners: Listeners | None = None,
        *,
        keeper: PlanKeeper | None = None,
        finds_leaks: bool = False,
    ) -> None:
        self._listeners = listeners if listeners is not None else Listeners()
        self._keeper = keeper
        self._drift = DriftWatch()
        self._leaks = LeakFinder(self.event) if finds_leaks else None
        self._resident = ResidentMemory()
        self._listening: list[Callable[[Event], None]] = []
        self._began_seconds = time.perf_counter()
        self._highest_bytes: int | None = None
        self._plan: Plan | None = None
        self._found_leaks: list[LeakEvent] = []
        self._num_steps = 0
        self._failure: tuple[Reason, int, str] | None = None
        self._has_ended = False

    def begin(self, facts: RunFacts) -> None:
        """Tell what is run."""
        if len(self._listeners):
            atexit.register(self._close_at_exit)
        self._listeners.begin(facts)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Tell of events from here on."""
        self._listening.append(listener)

    def step(self, number: int, done: Attempt, steps: PlannedSteps, batch: Any) -> None:
        """Tell of a step, and see whether its peak is the one predicted."""
        self._num_steps, self._failure = number, None
        self._keep(number, steps)
        reading, prediction = done.reading, steps.plan.prediction
        peak = reading.measured_peak_bytes
        if peak is not None:
            self._highest_bytes = max(peak, self._highest_bytes or 0)
        if len(self._listeners):
            self._listeners.step(
                StepRecord(
                    step=number,
                    time_seconds=time.perf_counter() - self._began_seconds,
                    step_seconds=reading.step_seconds,
                    peak_allocated_bytes=peak,
                    peak_reserved_bytes=reading.reserved_peak_bytes,
                    predicted_peak_bytes=prediction.peak_allocated_bytes if prediction else None,
                    allocator_retries=reading.allocator_retries,
                    host_bytes=self._resident.num_bytes(),
                    micro_batch_size=steps.micro_batch_size,
                    num_samples=done.num_samples,
                )
            )
        drift = self._drift.check(number, prediction, peak, steps.session.owned_tensors(batch))
        if drift is not None:
            self.event(drift)
        self._look_for_leaks("train", batch)

    def evaluated(self, batch: Any) -> None:
        """Note that a batch was evaluated."""
        self._look_for_leaks("evaluation", batch)

    def event(self, event: Event) -> None:
        """Tell that something happened; what nobody else would do anything about is warned of."""
        for listener in self._listening:
            listener(event)
        self._listeners.event(event)
        if isinstance(event, LeakEvent):
            self._found_leaks.append(event)
        if isinstance(event, LeakEvent | DriftEvent):
            warnings.warn(event_sentence(event), MemfitWarning, stacklevel=4)

    def event_of_next_step(self, event: UnprovedPlanEvent) -> None:
        """Tell of something that belongs to the step that has begun."""
        self.event(replace(event, step=self._num_steps + 1))

    def failed(self, error: BaseException) -> None:
        """Note that a step failed; unless another one is run, the run has ended with it."""
        # Not the error itself, whose traceback holds the tensors of the failed attempt.
        self._failure = _ended(error, self._num_steps)
        if isinstance(error, LostContextError):
            self.close()  # what follows may not come to an end in order

    def close(self) -> None:
        """Tell that the run is over."""
        if self._has_ended:
            return
        self._has_ended = True
        atexit.unregister(self._close_at_exit)
        if self._leaks is not None:
            self._leaks.finish()
        reason, exit_code, sentence = self._failure or _ended(None, self._num_steps)
        leaks = tuple(self._found_leaks)
        told = Reason.LEAK if leaks and reason is Reason.OUT_OF_MEMORY else reason
        self._listeners.end(
            Ending(
                reason=told,
                ended_by=reason.value,
                exit_code=exit_code,
                sentence=sentence,
                remedy=leaks[0].sentence if leaks else "",
                num_steps=self._num_steps,
                peak_allocated_bytes=self._highest_bytes,
                leaks=leaks,
            )
        )

    def _close_at_exit(self) -> None:
        """Close a run that nobody has closed; Python keeps an error that nobody has caught."""
        error = getattr(sys, "last_value", None)
        if self._failure is None and isinstance(error, BaseException):
            self._failure = _ended(error, self._num_steps)
        self.close()

    def _keep(self, number: int, steps: PlannedSteps) -> None:
        """Keep the plan whenever it has changed, and the timeline of a step once."""
        if self._keeper is None:
            return
        timeline = steps.taken_timeline()
        try:
            if steps.plan is not self._plan:
                self._plan = steps.plan
                self._keeper.keep_plan(steps.plan)
            if timeline is not None:
                predicted = steps.plan.prediction.timeline if steps.plan.prediction else None
                self._keeper.keep_timeline(
                    StepTimeline(step=number, measured=timeline, predicted=predicted)
                )
        except OSError as error:  # a full disk is no reason to stop training
            self._keeper = None
            msg = f"Plan and timeline are kept no more ({error}); training goes on."
            warnings.warn(msg, MemfitWarning, stacklevel=4)

    def _look_for_leaks(self, stream: str, batch: Any) -> None:
        if self._leaks is not None:
            self._leaks.boundary(stream, self._num_steps, bytes_in(batch))
            if self._leaks.failure is not None:
                msg = f"Leaks are looked for no more ({self._leaks.failure}); training goes on."
                self._leaks = None
                warnings.warn(msg, MemfitWarning, stacklevel=4)


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
