"""Runs steps that may run out of memory: undone, made smaller, and run again.

Nothing is recovered while the error is being handled, since its traceback holds the tensors of the
failed attempt (https://docs.pytorch.org/docs/stable/notes/faq.html, "My out of memory exception
handler can't allocate memory").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from memfit.errors import (
    BatchChangedError,
    LostContextError,
    MemfitError,
    NoSmallerPlanError,
    NotPutBackError,
    OtherRankError,
    OutOfMemoryAfterAllError,
    StrategyError,
    UndoFailedError,
    UpdateCutError,
)
from memfit.journal.records import Event, OutOfMemoryEvent, PlanClimbedEvent
from memfit.live_state import Obstacle
from memfit.observe.out_of_memory import has_lost_context, is_out_of_memory
from memfit.runtime.guard.attempts import Attempts, FailedAttempt
from memfit.runtime.guard.emergency import exit_with_code_of, save_emergency_checkpoint
from memfit.runtime.guard.ranks import Ranks, has_lost_peer
from memfit.runtime.guard.repetition import Repetition
from memfit.runtime.guard.step_entry import StepEntry
from memfit.runtime.guard.step_log import StepLog
from memfit.runtime.ladder import LargerPlans
from memfit.runtime.planned_steps import DoneStep, PlannedSteps
from memfit.runtime.retry import free_memory, retried


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """Say what the guard may take and when it tries larger plans again."""

    overhead_fraction: float = 0.002
    """The share of the time that writing the file to go back to may take."""
    climb_after_steps: int = 200
    """After so many steps without running out, the plan above is tried again; twice as many after
    each time that it failed. 0 never climbs."""
    folder: Path | None = None
    """Where a checkpoint is written should the card's context be lost; None takes the run's folder,
    or the current one."""


class Guard:
    """Run steps, each as if no attempt at it had ever failed.

    Whatever the job's own code can reach and change is put back; where something cannot be, that is
    said when the run starts, and a step that fails ends the run.

    Args:
        steps: what runs them.
        attempts: what attempts them.
        ranks: who goes through the same at the same time.
        settings: how far the guard goes.
        on_event: is told whenever something happened.
    """

    def __init__(
        self,
        steps: PlannedSteps,
        attempts: Attempts,
        ranks: Ranks,
        settings: GuardSettings,
        on_event: Callable[[Event], None],
    ) -> None:
        self._steps = steps
        self._attempts = attempts
        self._ranks = ranks
        self._settings = settings
        self._on_event = on_event
        self._device_type = steps.session.device_type
        self._log = StepLog(steps.session, settings.overhead_fraction)
        self._repetition = Repetition(steps, attempts, ranks, self._log)
        self._larger = LargerPlans(settings.climb_after_steps)
        self._end: MemfitError | None = None
        """Why no more steps are taken: what the last one has changed is still there in part."""
        self.events: list[OutOfMemoryEvent] = []

    @property
    def not_put_back(self) -> tuple[Obstacle, ...]:
        """Return what the job's code can reach and change, and nobody can put back."""
        return self._log.not_put_back

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """List the parameters, as they were when the latest step began."""
        return self._log.parameters

    def step(self, batch: Any, number: int) -> DoneStep:
        """Run a step, under ever smaller plans if need be.

        Raises:
            OutOfMemoryAfterAllError: if it fails under all of them.
            UpdateCutError: if its update was cut, and could not be undone.
            NotPutBackError: if it reaches what nobody can put back.
            BatchChangedError: if the job changes the batch, so that the step cannot be done over.
            UndoFailedError: if undoing it fails in turn, or failed for a step before it.
            LostContextError: if nothing can be computed on the card any more.
        """
        entry = self.begin(number)
        self._retried(lambda: self._log.take_batch(entry, batch))
        done, seconds = self._run_step(entry, number)
        self.end(entry, seconds)
        return done

    def begin(self, number: int) -> StepEntry:
        """Keep what a step begins with.

        Raises:
            MemfitError: if what an earlier step has changed could not be undone.
        """
        self._check_whole()
        self._steps.passes.settle()
        self._climb_if_due(number)
        entry: StepEntry = self._retried(self._log.begin)
        self._write_if_due(number, entry)
        return entry

    def run(self, entry: StepEntry, batch: Any, number: int) -> tuple[DoneStep, float]:
        """Run a step that has begun, or as much of it as the batch holds, until it is done.

        Args:
            entry: what it began with.
            batch: of it; a step whose batches come one by one is run with more of them each time.
            number: of the step.

        Returns:
            What was done, and how long the last attempt took.

        Raises:
            MemfitError: as ``step`` does.
        """
        self._retried(lambda: self._log.take_batch(entry, batch))
        return self._run_step(entry, number)

    def end(self, entry: StepEntry, seconds: float) -> None:
        """Log a step that is done, so that it can be repeated."""
        self._retried(partial(self._log.done, entry, seconds))
        self._larger.note_step()

    def rehearse(self, batch: Any, number: int) -> DoneStep:
        """Run a step, under ever smaller plans if need be, and undo it.

        Raises:
            MemfitError: if it could not be undone.
        """
        self._check_whole()
        self._steps.passes.settle()
        entry = self._retried(self._log.begin)
        self._retried(lambda: self._log.write(number - 1, entry))
        self._retried(lambda: self._log.take_batch(entry, batch))
        obstacle = self._log.obstacle or " ".join(map(str, self._log.fatal_obstacles))
        if obstacle:
            msg = f"A step cannot be rehearsed, as it could not be undone: {obstacle.rstrip('.')}."
            raise MemfitError(msg)
        done, _ = self._run_step(entry, number)
        self._retried(self._log.roll_back)
        self._retried(lambda: self._log.put_batch_back(entry))
        self._log.forget("a step was rehearsed")
        return done

    def forget(self) -> None:
        """Go back no further than to now: something else has changed the state."""
        self._end = None
        self._log.forget("the state was loaded from a checkpoint")

    def end_together(self, error: Exception) -> None:
        """End the wait of ranks that share the model, where this one fails outside of a step.

        Raises:
            OtherRankError: if it fails since another has left.
        """
        if not self._ranks.meets_in_update:
            return
        self._ranks.leave_training(for_sure=True)
        if has_lost_peer(error):
            raise OtherRankError(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """Drop what was kept to go back to."""
        self._log.close()

    def _run_step(self, entry: StepEntry, number: int) -> tuple[DoneStep, float]:
        """Attempt a step until it is done; give how long the last attempt took as well.

        Raises:
            LostContextError: if nothing can be computed on the card any more.
        """
        while True:
            self._repetition.begin()
            started = time.perf_counter()
            try:
                done = self._attempts.run(
                    entry.batch.batch, lambda: self._log.has_touched_large(entry)
                )
            except Exception as error:
                if not has_lost_context(error):
                    raise
                raise self._lost(number, error) from error
            if isinstance(done, DoneStep):
                return done, time.perf_counter() - started
            self._undo(entry, number, done)

    def _check_whole(self) -> None:
        if self._end is not None:
            raise self._end.with_traceback(None)

    def _undo(self, entry: StepEntry, number: int, failure: FailedAttempt) -> None:
        """Undo an attempt and take a smaller plan; where that fails, no more steps are taken.

        Raises:
            UndoFailedError: if memory does not suffice for it, time and again.
            MemfitError: as ``step`` does.
        """
        try:
            self._recover(entry, number, failure)
        except (OutOfMemoryAfterAllError, BatchChangedError):
            raise  # all is as it was before the step
        except (UpdateCutError, NotPutBackError) as error:
            self._end = error
            raise
        except BaseException as error:
            said = str(error).partition("\n")[0]
            reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
            self._end = UndoFailedError(number, failure.cause, reason)
            if not is_out_of_memory(error):
                raise
            raise self._end from error

    def _lost(self, number: int, error: Exception) -> LostContextError:
        """Save what can be saved, and make the error of a card whose context is lost."""
        cause = str(error).partition("\n")[0]
        folder = self._settings.folder or Path()
        saved = save_emergency_checkpoint(self._steps.session, self._log, folder)
        lost = LostContextError(
            number, cause, None if saved is None else str(saved), self._log.num_steps_before
        )
        exit_with_code_of(lost)
        return lost

    def _write_if_due(self, number: int, entry: StepEntry) -> None:
        """Write the file if that is due on any rank: all have to go back equally far."""
        is_due = self._log.is_due
        if self._ranks.num_ranks > 1:
            is_due = any(each[0] for each in self._ranks.exchange(int(is_due)))
        if is_due:
            self._retried(lambda: self._log.write(number - 1, entry))

    def _recover(self, entry: StepEntry, number: int, failure: FailedAttempt) -> None:
        """Undo an attempt and take a smaller plan.

        Raises:
            NotPutBackError: if it reaches what nobody can put back.
            BatchChangedError: if it has changed its batch.
        """
        plan = self._steps.plan.labels()
        free_memory(self._device_type)
        stays = self._has_what_stays()
        repeated = 0
        if failure.is_cut and not stays:
            repeated = self._repetition.go_back(entry, number, failure)
        self._retried(entry.restore)
        has_batch = self._retried(lambda: self._log.put_batch_back(entry))
        if stays:
            sentences = " ".join(map(str, self._log.fatal_obstacles))
            raise NotPutBackError(number, failure.cause, sentences or "another rank cannot.")
        if not has_batch:
            raise BatchChangedError(number, failure.cause)
        self._take_smaller_plan(number, failure.cause)
        entry.random.put_back()
        # Another plan has other hooks, and the logged steps were run under the one before.
        self._retried(lambda: self._log.begin_again(entry))
        self._retried(lambda: self._log.write(number - 1, entry))
        self._retried(lambda: self._log.take_batch(entry, entry.batch.batch))
        event = OutOfMemoryEvent(
            step=number,
            phase=failure.place,
            cause=failure.cause,
            plan=plan,
            next_plan=self._steps.plan.labels(),
            num_steps_repeated=repeated,
            rank=failure.rank,
        )
        self.events.append(event)
        self._on_event(event)

    def _has_what_stays(self) -> bool:
        """Return whether something that a step may have changed stays so, on any rank."""
        said = self._ranks.exchange(int(bool(self._log.fatal_obstacles)))
        return any(each[0] for each in said)

    def _take_smaller_plan(self, number: int, cause: str) -> None:
        """Go on with the next smaller plan, the same on every rank.

        Raises:
            OutOfMemoryAfterAllError: if there is none.
        """
        plan, reason = self._steps.plan, None
        try:
            self._steps.take_smaller_plan()
        except NoSmallerPlanError as error:
            reason = error.reason
        said = self._ranks.exchange(int(reason is not None), self._steps.plan.checksum())
        if reason is not None:
            plans = [" + ".join(event.plan) or "as it is" for event in self.events]
            plans.append(" + ".join(plan.labels()) or "as it is")
            raise OutOfMemoryAfterAllError(number, [*dict.fromkeys(plans)], cause, reason)
        if len(set(said)) > 1:
            msg = "the ranks have not come to the same plan"
            raise OtherRankError(msg)
        self._larger.note_descent(plan)

    def _climb_if_due(self, number: int) -> None:
        """Try the plan above again, after many steps that went well."""
        plan = self._larger.due_plan()
        if plan is None:
            return
        before = self._steps.plan.labels()
        try:
            self._steps.change_plan(plan)
        except StrategyError:  # the job has changed since; where it is, it may stay
            self._larger.note_refusal()
            return
        self._larger.note_climb()
        self._log.forget("the plan was changed")
        self._on_event(
            PlanClimbedEvent(step=number, plan=before, next_plan=self._steps.plan.labels())
        )

    def _retried(self, action: Callable[[], Any]) -> Any:
        """Run what the guard itself needs, again if memory is short."""
        return retried(action, self._device_type)
