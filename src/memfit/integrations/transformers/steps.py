"""Carries out the windows of a Trainer under a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, NamedTuple

import torch

from memfit.integrations.transformers.batches import check_can_be_cut, rows_of
from memfit.integrations.transformers.training_step import TrainingStep, changes_gradients
from memfit.live_state import Snapshot
from memfit.live_state.random_sources import GlobalRandomness, RandomSourcesReader
from memfit.observe.observer import StepObserver
from memfit.runtime.first_step_check import check_split
from memfit.runtime.planned_steps import (
    DATA_TRANSFER,
    DoneStep,
    PlannedSteps,
    apply_strategies,
    undo_all,
)
from memfit.separation.separation import Separation
from memfit.session.forwards import forwards_kept
from memfit.session.session import Session
from memfit.strategies.base import Undo
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.facts import known_separation
from memfit.strategies.plan import Plan
from memfit.trace.events import Phase

_MOST_STARTS = 2000


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


class TrainerSteps(PlannedSteps):
    """Run windows, measured as one step each; what guards and repeats them sees a list of parts.

    A window grows part by part: its batches, the norm of its gradients, the update. An attempt runs
    the part that came last; where the gradients of those before it are lost, since an attempt has
    failed, it runs them again first.

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
        self._undos: list[Undo] = []
        separation = Separation(session.job, session.layout, inside=self._taken_off)
        for size, proof in step.proofs.items():
            separation.settle(size, proof)
        gather_facts(session, separation=separation)
        _ask(plan, session)
        super().__init__(session, plan, observer=observer, try_split=check_split)
        self._starts: dict[int, GlobalRandomness] = {}
        self._reader = RandomSourcesReader()
        self._early: list[torch.Tensor | None] | None = None
        self.window: list[Part] = []
        """Under way; the last part is the one to be run."""
        self.snapshots: list[Snapshot | None] = []
        """What each part of the window began with; None for the first, and without a guard."""
        self.sums: list[torch.Tensor | None] | None = None
        """The gradients that were there when the last part came; None once they are lost."""
        self.batches: Sequence[Any] = ()
        """All that the window holds, where its batches are fetched at once."""
        self.norm: Callable[[], Any] = _nothing
        """Takes the norm of the gradients, as the Trainer does."""
        self.update: Callable[[], Any] = _nothing
        """Steps the optimizer, as the Trainer does."""
        self.found_norm: Any = None

    def take(self, part: Part, snapshot: Snapshot | None) -> None:
        """Add a part to the window; the gradients that are there are put aside until it is run."""
        parameters = [*self.session.model.parameters()]
        self.sums = [parameter.grad for parameter in parameters]
        if not self.window:  # an epoch that was left early has its gradients in the next window
            has_early = any(gradient is not None for gradient in self.sums)
            self._early = _copies(self.sums) if has_early else None
        self.window.append(part)
        self.snapshots.append(snapshot)
        if snapshot is not None:
            self._starts[part.total_index] = GlobalRandomness.here(self._reader)
            while len(self._starts) > _MOST_STARTS:
                del self._starts[next(iter(self._starts))]
        for parameter in parameters:
            parameter.grad = None

    def end_window(self) -> None:
        """Begin with an empty one."""
        if self.window and self.window[-1].kind != Kind.UPDATE:  # it was left early
            self.observer.drop_step()
        self.window, self.snapshots, self._early, self.batches = [], [], None, ()

    def change_plan(self, plan: Plan) -> None:
        """Run the steps to come under another plan; on an error the old one stays."""
        _ask(plan, self.session)
        super().change_plan(plan)

    @contextmanager
    def _taken_off(self) -> Iterator[None]:
        """Take the plan off the living model, so that it is recorded as it is."""
        if not self._undos:
            yield
            return
        undo_all(self._undos)
        self._undos = []
        try:
            yield
        finally:
            self._undos = apply_strategies(self.session, self.plan.strategies)

    def on_device(self, batch: Any) -> Any:
        """Leave a batch alone: the Trainer moves it."""
        return batch

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
        is_current = [part.total_index for part in parts] == [
            part.total_index for part in self.window
        ]
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

    def _put_sums_back(self) -> bool:
        """Give parameters the gradients that were put aside; say whether there were any still."""
        sums, self.sums = self.sums, None
        for parameter, gradient in zip(self.session.model.parameters(), sums or (), strict=False):
            parameter.grad = gradient
        return sums is not None

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
            if is_again or (number == 0 and self._early is not None):
                self._begin_again(number, part, is_current=is_current)
            if part.kind == Kind.PASS:
                loss = self._pass_over(part)
            elif part.kind == Kind.NORM:
                self._take_norm(is_again=is_again)
            else:
                self._update(before_update)
                if not is_current:  # what the Trainer does behind a window of its own
                    self.drop_gradients()
        return loss

    def _begin_again(self, number: int, part: Part, *, is_current: bool) -> None:
        """Go back to what a part began with; what the first began with is there."""
        if number == 0:
            if is_current and self._early is not None:
                parameters = self.session.model.parameters()
                for parameter, gradient in zip(parameters, _copies(self._early), strict=True):
                    parameter.grad = gradient
            return
        snapshot = self.snapshots[number] if is_current else None
        if snapshot is not None:
            with forwards_kept(self.session.model):  # the plan may have become another
                snapshot.restore()
        elif part.total_index in self._starts:
            self._starts[part.total_index].put_back()

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

    def _take_norm(self, *, is_again: bool) -> None:
        """Take the norm; where it is taken again, callbacks behind it change gradients again."""
        self.enter_phase(Phase.OPTIMIZER)
        self.found_norm = self.norm()
        handler = self._trainer.callback_handler
        if is_again and any(map(changes_gradients, handler.callbacks)):
            handler.on_pre_optimizer_step(
                self._trainer.args, self._trainer.state, self._trainer.control
            )

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


def _copies(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if each is None else each.clone() for each in gradients]


def _nothing() -> None:
    """Do nothing."""


def _ask(plan: Plan, session: Session) -> None:
    """Find out what a plan's pieces do before anything of it is on the model."""
    if plan.splitting is not None:
        plan.splitting.separability(known_separation(session))
