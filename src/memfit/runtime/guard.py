"""Carries out steps that may run out of memory: undone, made smaller, and carried out again.

Nothing is recovered while the error is being handled, since its traceback holds the tensors of the
failed attempt (https://docs.pytorch.org/docs/stable/notes/faq.html, "My out of memory exception
handler can't allocate memory").
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from memfit.errors import OutOfMemoryAfterAllError, StrategyError, UpdateCutError
from memfit.journal.records import OutOfMemoryEvent
from memfit.runtime.out_of_memory import is_out_of_memory
from memfit.runtime.planned_steps import Attempt, PlannedSteps
from memfit.runtime.step_log import StepEntry, StepLog
from memfit.trace.events import Phase

_R = TypeVar("_R")
_MOST_TRIES = 3
"""How often the guard tries what little it allocates itself."""


class Guard:
    """Carry out steps, each as if no attempt at it had ever failed.

    Not undone: what the job's own functions do besides, such as metrics that they add to; they see
    the batch of a failed attempt again.
    """

    def __init__(self, steps: PlannedSteps) -> None:
        self._steps = steps
        self._log = StepLog(steps.session)
        self.events: list[OutOfMemoryEvent] = []

    def step(self, batch: Any, number: int) -> Attempt:
        """Carry out a step, under ever smaller plans if need be.

        Raises:
            OutOfMemoryAfterAllError: if it fails under all of them.
            UpdateCutError: if its update was cut, and could not be undone.
        """
        entry = self._insist(lambda: self._log.begin(batch))
        while True:
            started = time.perf_counter()
            done, cause = self._tried(batch)
            if cause is None:
                self._log.done(entry, time.perf_counter() - started)
                assert done is not None, "an attempt that did not fail gives a result"
                return done
            self._recover(entry, number, cause)

    def forget(self) -> None:
        """Go back no further than to now: something else has changed the state."""
        self._log.forget()

    def close(self) -> None:
        """Drop what was kept to go back to."""
        self._log.close()

    def _tried(self, batch: Any) -> tuple[Attempt | None, str | None]:
        """Attempt a step; give its result, or why it ran out of memory."""
        try:
            return self._steps.attempt(batch), None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            cause = str(error).strip().partition("\n")[0] or type(error).__name__
        # The step drops its gradients, but may have failed in that as well.
        for parameter in self._steps.session.model.parameters():
            parameter.grad = None
        return None, cause

    def _recover(self, entry: StepEntry, number: int, cause: str) -> None:
        """Undo an attempt and take a smaller plan."""
        phase, plan = self._steps.phase, self._steps.plan.labels()
        _free(self._steps.session.device_type)
        repeated = self._undo(entry, phase, number, cause)
        if self._steps.plan.labels() == plan:
            self._take_smaller_plan(number, cause)
        # The logged steps were carried out under the plan before.
        self._insist(self._log.write)
        self.events.append(
            OutOfMemoryEvent(
                step=number,
                phase=phase.value,
                cause=cause,
                plan=plan,
                next_plan=self._steps.plan.labels(),
                num_steps_repeated=repeated,
            )
        )

    def _undo(self, entry: StepEntry, phase: Phase, number: int, cause: str) -> int:
        """Put everything back as it was before the step; give the number of steps repeated."""
        session, repeated = self._steps.session, 0
        # Fused optimizers and batch normalisation change tensors without telling autograd, so
        # versions of tensors do not show what an attempt has changed.
        is_cut = phase is Phase.OPTIMIZER or session.updates_in_backward
        if is_cut or entry.buffers is None:
            repeated = self._repeat(number, cause)
        self._insist(lambda: entry.restore(session))
        return repeated

    def _repeat(self, number: int, cause: str) -> int:
        """Go back to the file, and carry out again what was done since.

        Raises:
            UpdateCutError: if there is no file.
        """
        if self._log.obstacle is not None:
            raise UpdateCutError(number, cause, self._log.obstacle)
        entries = [*self._log.entries]
        while True:
            self._insist(self._log.roll_back)
            if all(self._repeated(entry) for entry in entries):
                return len(entries)
            _free(self._steps.session.device_type)
            self._insist(self._log.roll_back)
            self._insist(lambda: entries[0].restore(self._steps.session))
            self._take_smaller_plan(number - len(entries), cause)

    def _repeated(self, entry: StepEntry) -> bool:
        self._insist(lambda: entry.restore(self._steps.session))
        _, cause = self._tried(entry.batch)
        return cause is None

    def _insist(self, action: Callable[[], _R]) -> _R:
        """Carry out what the guard itself needs and may be done over, again if memory is short."""
        for _ in range(_MOST_TRIES - 1):
            try:
                return action()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            _free(self._steps.session.device_type)
        return action()

    def _take_smaller_plan(self, number: int, cause: str) -> None:
        """Go on with the next smaller plan.

        Raises:
            OutOfMemoryAfterAllError: if there is none.
        """
        plans = [" + ".join(event.plan) or "as it is" for event in self.events]
        plans.append(" + ".join(self._steps.plan.labels()) or "as it is")
        try:
            self._steps.take_smaller_plan()
        except StrategyError as error:
            tried = [*dict.fromkeys(plans)]
            raise OutOfMemoryAfterAllError(number, tried, cause, error.reason) from None


def _free(device_type: str) -> None:
    """Give back what the failed attempt left behind."""
    gc.collect()
    if device_type == "cuda":
        torch.cuda.empty_cache()
