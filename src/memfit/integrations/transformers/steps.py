"""Carries out the windows of a Trainer under a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from memfit.integrations.transformers.batches import check_can_be_cut, rows_of
from memfit.integrations.transformers.training_step import TrainingStep, changes_gradients
from memfit.integrations.windows import WindowSteps
from memfit.live_state import Snapshot
from memfit.observe.observer import StepObserver
from memfit.runtime.planned_steps import (
    DATA_TRANSFER,
    DoneStep,
)
from memfit.session.session import Session
from memfit.strategies.plan import Plan
from memfit.trace.events import Phase

_MOST_STARTS = 2000


Sums = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
"""Parameters with their gradients."""


class Kind(StrEnum):
    """What a part of a window does."""

    PASS = "pass"
    NORM = "norm"
    """Takes the norm of whole gradients, and clips them."""
    UPDATE = "update"


class Part(NamedTuple):
    """One batch of a window, or what follows its batches."""

    total_index: int
    """Counts the parts of all windows."""
    kind: str
    num_batches: int
    """How many the window has."""
    batch: Any


class TrainerSteps(WindowSteps[Part]):
    """Run windows, measured as one step each: batches, the norm of their gradients, the update.

    Args:
        step: the step of the trainer.
        session: on the living objects.
        plan: how.
        observer: measures every attempt.
    """

    def __init__(
        self, step: TrainingStep, session: Session, plan: Plan, *, observer: StepObserver
    ) -> None:
        self._step = step
        self._trainer = step.trainer
        session.backward = self._backward
        self._is_training = False
        super().__init__(session, plan, observer=observer, proofs=step.proofs)
        self._early: Sums = ()
        self.batches: Sequence[Any] = ()
        """All that the window holds, where its batches are fetched at once."""
        self.norm: Callable[[], Any] = _nothing
        """Takes the norm of the gradients, as the Trainer does."""
        self.update: Callable[[], Any] = _nothing
        """Steps the optimizer, as the Trainer does."""
        self.found_norm: Any = None

    def take(self, part: Part, snapshot: Snapshot | None) -> None:
        """Add a part to the window; the gradients that are there are put aside until it is run."""
        is_first = not self.window
        super().take(part, snapshot)
        if is_first:  # an epoch that was left early has its gradients in the next window
            sums = self.sums or ()
            has_early = any(gradient is not None for _, gradient in sums)
            self._early = _copies(sums) if has_early else ()

    def end_window(self) -> None:
        """Begin with an empty one."""
        if self.window and self.window[-1].kind != Kind.UPDATE:  # it was left early
            self.observer.drop_step()
        super().end_window()
        self._early, self.batches = (), ()

    def checked(self, batch: Any) -> Any:
        """Return a batch that the plan's pieces may be cut from."""
        if self.cuts(rows_of(batch)):
            check_can_be_cut(batch)
        return super().checked(batch)

    def attempt(self, batch: Any, before_update: Callable[[], None] | None = None) -> DoneStep:
        """Run the part that came last."""
        parts = [Part(*each) for each in batch]
        has_sums = self._put_sums_back()
        self.place = DATA_TRANSFER
        is_current = self._is_current(parts)
        begin = len(parts) - 1 if is_current and has_sums else 0
        for part in parts[begin:]:
            if part.kind == Kind.PASS:
                self.checked(part.batch)
        if begin == 0:
            batches = [part.batch for part in parts]
            self.observer.begin_step((self.batches or batches) if is_current else batches)
            self.session.spill.begin_step()
        try:
            loss = self._carry_out(parts, begin, before_update, is_current=is_current)
        except BaseException:
            self.on_failure()
            self.observer.drop_step()
            raise
        if parts[-1].kind == Kind.UPDATE:
            self.observer.measured()
        num_samples = sum(rows_of(part.batch) for part in parts if part.kind == Kind.PASS)
        return DoneStep(loss=loss, num_samples=num_samples, reading=self.observer.reading)

    def _carry_out(
        self,
        parts: Sequence[Part],
        begin: int,
        before_update: Callable[[], None] | None,
        *,
        is_current: bool,
    ) -> torch.Tensor:
        loss = torch.zeros(())
        is_again = begin == 0 and (len(parts) > 1 or not is_current)
        for number, part in enumerate(parts[begin:], begin):
            if is_again or (number == 0 and self._early):
                self._begin_again(number, part, is_current=is_current)
            if part.kind == Kind.PASS:
                loss = self._pass_over(part)
            elif part.kind == Kind.NORM:
                # Where the norm is taken again, callbacks behind it change gradients again.
                self.enter_phase(Phase.OPTIMIZER)
                self.found_norm = self.norm()
                handler = self._trainer.callback_handler
                if is_again and any(map(changes_gradients, handler.callbacks)):
                    handler.on_pre_optimizer_step(
                        self._trainer.args, self._trainer.state, self._trainer.control
                    )
            else:
                self._update(before_update)
                if not is_current:  # what the Trainer does behind a window of its own
                    self.drop_gradients()
        return loss

    def _begin_again(self, number: int, part: Part, *, is_current: bool) -> None:
        """Go back to what a part began with, gradients of a window that was left included."""
        if number == 0 and is_current:
            for parameter, gradient in _copies(self._early):
                parameter.grad = gradient
        super()._begin_again(number, part, is_current=is_current)

    def _pass_over(self, part: Part) -> torch.Tensor:
        """Add the gradients of a batch to those that are there."""
        trainer = self._trainer
        before = trainer.current_gradient_accumulation_steps
        trainer.current_gradient_accumulation_steps = part.num_batches
        self._is_training = True
        self.enter_phase(Phase.FORWARD)
        try:
            with self._step.running(part.batch):
                return self.session.gradient_pass(self.session, part.batch, self.enter_phase)
        finally:
            self._is_training = False
            trainer.current_gradient_accumulation_steps = before

    def _update(self, before_update: Callable[[], None] | None) -> None:
        if before_update is not None:
            before_update()
        self.enter_phase(Phase.OPTIMIZER)
        state = self._trainer.accelerator.gradient_state
        is_due = state.sync_gradients
        state._set_sync_gradients(True)
        try:
            self.update()
        finally:
            state._set_sync_gradients(is_due)

    def _backward(self, loss: torch.Tensor) -> None:
        """Backpropagate as the accelerator does."""
        if self._is_training:
            self._trainer.accelerator.backward(loss)
        else:
            loss.backward()


def _copies(sums: Sums) -> Sums:
    return [(each, None if gradient is None else gradient.clone()) for each, gradient in sums]


def _nothing() -> None:
    """Do nothing."""
