"""Carries out the updates of Lightning's loop under a plan, its hooks called as often as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from memfit.errors import StrategyError
from memfit.integrations.batches import num_rows
from memfit.integrations.lightning.framework import Progress, call_hook, hooks_muted, part_of
from memfit.integrations.lightning.training_step import StepSkippedError, TrainingStep
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

_BEFORE, _AFTER = frozenset({"on_before_backward"}), frozenset({"on_after_backward"})
_MOST_STARTS = 2000


class Part(NamedTuple):
    """One batch of a window: the batches whose gradients add up to one update."""

    total_index: int
    """Counts the batches of all epochs."""
    batch_index: int
    divisor: float
    batch: Any


class LightningSteps(WindowSteps[Part]):
    """Run windows of batches; those that are run again are, without a word to loggers.

    Args:
        step: the training step of the trainer's module.
        session: on the living objects.
        plan: how.
        observer: measures every attempt.
    """

    def __init__(
        self, step: TrainingStep, session: Session, plan: Plan, *, observer: StepObserver
    ) -> None:
        self._step = step
        self._trainer = step.trainer
        self._loop = step.trainer.fit_loop.epoch_loop.automatic_optimization
        self._progress = Progress(self._loop.optim_progress)
        self._is_training = self._has_gone_back = self._is_cut = False
        session.backward = self._backward
        with step.metrics.replaced():
            super().__init__(session, plan, observer=observer)
        self.accumulates = False
        """Whether the last part is followed by more before the update."""
        self.scale: float = 1.0
        """What whole gradients are multiplied by before the update."""
        self.is_skipped = False

    def take(self, part: Part, snapshot: Snapshot | None) -> None:
        """Add a batch to the window; the gradients that are there are put aside until it is run."""
        super().take(part, snapshot)
        self._progress.keep()

    def as_before(self) -> AbstractContextManager[None]:
        """Have the loop's counters be what they were when the last batch came."""
        return self._progress.as_kept()

    def change_plan(self, plan: Plan) -> None:
        """Run the steps to come under another plan; on an error the old one stays."""
        with self._step.metrics.replaced():
            super().change_plan(plan)

    def attempt(self, batch: Any, before_update: Callable[[], None] | None = None) -> DoneStep:
        """Run the part that came last, and the update where it is due."""
        self._progress.put_back()
        self.is_skipped = False
        self._has_sums = self._put_sums_back()
        self.place = DATA_TRANSFER
        with self._step.logged.collecting(), self._step.metrics.replaced():
            self.checked(batch[-1][-1])
            with self.observer.measuring(batch):
                self.session.spill.begin_step()
                try:
                    loss = self._carry_out(batch, before_update)
                except BaseException:
                    self.on_failure()
                    raise
        samples = num_rows(batch[-1][-1])
        return DoneStep(loss=loss, num_samples=samples, reading=self.observer.reading)

    def clear_old_gradients(self) -> None:
        """Call what Lightning calls between forward and backward."""
        optimizer = self._trainer.optimizers[0]
        self._loop._on_before_zero_grad(optimizer)
        self._loop._optimizer_zero_grad(self._step.batch_index, optimizer)

    def _carry_out(self, batch: Any, before_update: Callable[[], None] | None) -> torch.Tensor:
        is_current = self._is_current(batch)
        parts = [Part(*each) for each in batch]
        if not (is_current and self._has_sums):
            for number, part in enumerate(parts[:-1]):
                self._begin_again(number, part, is_current=is_current)
                self._pass_over(part, is_first=number == 0)
            self._begin_again(len(parts) - 1, parts[-1], is_current=is_current)
        is_first = len(parts) == 1
        if is_current and self.accumulates:
            return self._pass_over(parts[-1], is_first=is_first)
        losses: list[torch.Tensor] = []

        def closure(*_: Any, **__: Any) -> torch.Tensor | None:
            with torch.enable_grad():
                losses[:] = [self._pass_over(parts[-1], is_first=is_first)]
            if self.scale != 1.0 and is_current:
                self._scale_gradients()
            if before_update is not None:
                before_update()
            self.enter_phase(Phase.OPTIMIZER)
            return None if self.is_skipped else losses[0]

        self._loop._optimizer_step(parts[-1].batch_index, closure)
        if not losses:
            exceptions = part_of(self._trainer, "utilities.exceptions")
            msg = "The closure hasn't been executed."
            raise exceptions.MisconfigurationException(msg)
        return losses[0]

    def _pass_over(self, part: Part, *, is_first: bool) -> torch.Tensor:
        """Add the gradients of a batch to those that are there."""
        self._step.divisor, self._step.batch_index = part.divisor, part.batch_index
        self._has_old_gradients = is_first
        self._is_training, self._has_gone_back = True, False
        num_samples = num_rows(part.batch)
        self._is_cut = self.cuts(num_samples)
        self.release_before_pieces(num_samples)
        self.enter_phase(Phase.FORWARD)
        try:
            with self._step.counting(part.batch):
                loss = self.session.gradient_pass(self.session, part.batch, self.enter_phase)
        except StepSkippedError:
            return self._skip(part)
        finally:
            self._is_training = False
        if self._is_cut:  # between pieces the module has to be left as it is
            call_hook(self._trainer, *_BEFORE, loss)
        call_hook(self._trainer, *_AFTER)
        return loss

    def _skip(self, part: Part) -> torch.Tensor:
        """Leave out a batch without a loss, as Lightning does.

        Raises:
            StrategyError: if pieces of the batch have one.
        """
        if self._has_gone_back or (self._is_cut and self._has_a_loss(part)):
            reason = (
                "training_step returned None for some pieces of a batch and not for others, so "
                "what it returns for the whole batch is not known. Return None for whole batches "
                "only, or forbid the strategies that cut."
            )
            raise StrategyError("micro-batching", reason)
        if self._trainer.world_size > 1:
            msg = (
                "Skipping the `training_step` by returning None in distributed training is not "
                "supported."
            )
            raise RuntimeError(msg)
        self.is_skipped = True
        if self._has_old_gradients:
            self._has_old_gradients = False
            self.clear_old_gradients()
        return torch.zeros(())

    @torch.no_grad()
    def _has_a_loss(self, part: Part) -> bool:
        """Return whether training_step gives a loss for any piece of a batch but the first."""
        pieces = self.session.layout.split(part.batch, self.session.micro_batch_size)
        for number, (piece, _) in enumerate(pieces):
            try:
                if number:
                    self.session.loss_of(piece)
                    return True
            except StepSkippedError:
                continue
        return False

    def _backward(self, loss: torch.Tensor) -> None:
        """Backpropagate as the trainer's strategy and precision have it."""
        if not self._is_training:
            loss.backward()
            return
        muted = _AFTER | _BEFORE if self._is_cut else _AFTER
        self._has_gone_back = True
        call: Any = part_of(self._trainer, "trainer.call")
        with ExitStack() as stack:
            stack.enter_context(hooks_muted(self._trainer, muted))
            stack.enter_context(self._unsynchronized())
            call._call_strategy_hook(self._trainer, "backward", loss, self._trainer.optimizers[0])

    @contextmanager
    def _unsynchronized(self) -> Iterator[None]:
        """Have ranks exchange nothing during backward: gradients are averaged once, at the end."""
        loops: Any = part_of(self._trainer, "loops.utilities")
        with loops._block_parallel_sync_behavior(self._trainer.strategy, block=True):
            yield

    @torch.no_grad()
    def _scale_gradients(self) -> None:
        for parameter in self.session.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale)
