"""Runs steps under a plan, which may be changed in between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memfit.devices.spec import CPU
from memfit.errors import NoSmallerPlanError, StrategyError
from memfit.live_state.imports import load_imports
from memfit.observe.observer import StepObserver
from memfit.observe.peaks import StepReading
from memfit.runtime.batch_checks import BatchChecks, TrySplit
from memfit.runtime.ladder import smaller_plans
from memfit.runtime.shards.cut_passes import CutPasses
from memfit.session.reachable import roots_of
from memfit.session.session import PhaseListener, Session
from memfit.strategies.base import Strategy, Undo
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.plan import Plan, conflict, in_catalogue_order
from memfit.trace.events import Phase
from memfit.trace.origins import line_of_function
from memfit.trace.purposes import tell_batch

DATA_TRANSFER = "data transfer"
_ENOUGH_BATCHES = 2
"""What the second batch of an update takes, all later ones take as well."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneStep:
    """What one step gave: the loss, a detached scalar, and what was read of it."""

    loss: torch.Tensor
    num_samples: int
    reading: StepReading


class PlannedSteps:
    """Run a session's steps under a plan.

    Args:
        session: what is run.
        plan: how.
        phase_listener: is told of every part of a step.
        observer: is told of every part of a step as well, and measures it.
        try_split: tries pieces that could not be proved to keep the results on the first batch;
            None leaves them untried.

    Raises:
        StrategyError: if a strategy of the plan cannot apply.
    """

    def __init__(
        self,
        session: Session,
        plan: Plan,
        *,
        phase_listener: PhaseListener | None = None,
        observer: StepObserver | None = None,
        try_split: TrySplit | None = None,
    ) -> None:
        self.session = session
        self.plan = plan
        self.observer = observer or StepObserver()
        self.place: str = Phase.FORWARD.value
        """The part that the latest step has come to: a phase, or the transfer of its batch."""
        self.on_failure: Callable[[], None] = _nothing
        """Is called when a step has failed, before its gradients are dropped."""
        self.passes = CutPasses(session.model)
        """Puts back what a pass that was cut has left in a sharded model."""
        self._listener = phase_listener
        self._has_old_gradients = False
        self.checks = None if session.is_virtual else BatchChecks(session, try_split=try_split)
        if not session.is_virtual:
            load_imports(roots_of(session))
        self._undos = apply_strategies(session, plan.strategies)
        session.optimizer.zero_grad(set_to_none=True)

    def attempt(self, batch: Any, before_update: Callable[[], None] | None = None) -> DoneStep:
        """Run one step; tensors that are not on the session's device are moved there.

        ``before_update`` is called when the gradients are there.
        """
        self.place = DATA_TRANSFER
        batch = self.checked(batch)
        session = self.session
        order = session.job.order
        session.num_samples = num_samples = session.layout.num_samples(batch)
        self._has_old_gradients = order.keeps_gradients
        self.passes.settle()
        with self.observer.measuring(batch):
            session.spill.begin_step()
            try:
                self.enter_phase(Phase.FORWARD)
                self.release_before_pieces(num_samples)
                for _ in range(min(order.num_batches, _ENOUGH_BATCHES)):
                    loss = session.gradient_pass(session, batch, self.enter_phase)
                self.passes.settle()
                if before_update is not None:
                    before_update()
                if session.loss_over_ranks is not None:
                    loss = session.loss_over_ranks(loss)
                self.enter_phase(Phase.OPTIMIZER)
                if order.before_update is not None:
                    order.before_update(session.optimizer)
                session.update(session)
            except BaseException:
                self.passes.put_back()
                self.on_failure()
                raise
            finally:  # the gradients of a step that failed are not those of the next one
                session.num_counted = None
                if not order.keeps_gradients:
                    session.optimizer.zero_grad(set_to_none=True)
        return DoneStep(loss=loss, num_samples=num_samples, reading=self.observer.reading)

    def checked(self, batch: Any) -> Any:
        """Return a batch on the session's device that the plan's pieces may be cut from.

        Raises:
            NotSeparableError: if they would not keep the results.
            BatchConditionError: if they would not for what the batch contains.
        """
        if self.checks is None:
            return self.on_device(batch)
        self.checks.check(self.plan, batch)
        batch = self.on_device(batch)
        self.checks.try_unproved(self.plan, batch)
        return batch

    def clear_old_gradients(self) -> None:
        """Drop the gradients of the update before, where they have lived on."""
        self.session.optimizer.zero_grad(set_to_none=True)

    def drop_gradients(self) -> None:
        """Drop what gradients there are; a step does so itself, but may fail in that as well."""
        for parameter in self.session.model.parameters():
            parameter.grad = None

    @property
    def micro_batch_size(self) -> int:
        """Return how many samples are computed at a time."""
        splitting = self.plan.splitting
        return self.session.job.batch_size if splitting is None else splitting.micro_batch_size

    def take_smaller_plan(self) -> None:
        """Go on with the next plan of the ladder, or with half the micro-batch.

        Raises:
            NoSmallerPlanError: if there is nothing smaller that keeps the results.
        """
        for plan in smaller_plans(self.plan, self.session):
            try:
                self.change_plan(plan)
            except StrategyError:
                continue
            return
        raise NoSmallerPlanError("none of its plans can be applied here.")

    def close(self) -> None:
        """Take the strategies off the model and the optimizer."""
        undo_all(self._undos)
        self._undos = []

    def change_plan(self, plan: Plan) -> None:
        """Run the steps to come under another plan; on an error the old one stays.

        What both plans keep, such as the scale of gradients, goes on.
        """
        stateful = self.session.stateful
        kept = {name: copy.deepcopy(part.state_dict()) for name, part in stateful.items()}
        self.close()
        try:
            self._undos = apply_strategies(self.session, plan.strategies)
        except BaseException:  # to apply a strategy may run out of memory
            self._undos = apply_strategies(self.session, self.plan.strategies)
            self._take_up(kept)
            raise
        self._take_up(kept)
        self.plan = plan

    def _take_up(self, kept: dict[str, dict[str, Any]]) -> None:
        for name, state in kept.items():
            if name in self.session.stateful:
                self.session.stateful[name].load_state_dict(state)

    def on_device(self, batch: Any) -> Any:
        """Move a batch to the GPU; on the CPU it is left alone."""
        place = self.session.device_type
        if place == CPU:
            return batch
        moved = tree_map_only(torch.Tensor, lambda t: t.to(place, non_blocking=True), batch)
        return tell_batch(moved, line_of_function(self.session.job.batch))

    def cuts(self, num_samples: int) -> bool:
        """Return whether a batch of so many samples is run in pieces."""
        splitting = self.plan.splitting
        return splitting is not None and splitting.micro_batch_size < num_samples

    def release_before_pieces(self, num_samples: int) -> None:
        """End the gradients of the step before, where the batch is run in pieces."""
        if self.cuts(num_samples):
            self._release_old_gradients()

    def _release_old_gradients(self) -> None:
        if self._has_old_gradients:
            self._has_old_gradients = False
            self.clear_old_gradients()

    def enter_phase(self, phase: Phase) -> None:
        """Note that a part of the step begins; backward ends the gradients of the step before."""
        if phase is Phase.BACKWARD:
            self._release_old_gradients()
        self.place = str(phase)
        self.observer.phase(phase)
        if self._listener is not None:
            self._listener(phase)


def apply_strategies(session: Session, strategies: Sequence[Strategy]) -> list[Undo]:
    """Apply strategies in the order of the catalogue; all of them, or none.

    Raises:
        StrategyError: if one cannot apply, with the reason.
    """
    if clash := conflict(strategies):
        raise StrategyError(strategies[0].name, f"{clash}.")
    undos: list[Undo] = []
    facts = gather_facts(session)
    try:
        for strategy in in_catalogue_order(strategies):
            if reason := strategy.obstacle(facts):
                raise StrategyError(strategy.name, reason)
            undos.append(strategy.apply(session))
    except BaseException:
        undo_all(undos)
        raise
    return undos


def undo_all(undos: Sequence[Undo]) -> None:
    """Take strategies off, the last one first."""
    for undo in reversed(undos):
        undo()
