"""Takes the place of Lightning's automatic optimization for as long as a plan is in force."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memfit.comparison.gradients import accumulate_gradients
from memfit.errors import (
    JobFunctionError,
    MemfitError,
    MemfitWarning,
    OutOfMemoryAfterAllError,
)
from memfit.integrations.lightning.batches import num_rows
from memfit.integrations.lightning.framework import Progress, callbacks_muted
from memfit.integrations.lightning.log_trial import LogTrial
from memfit.integrations.lightning.steps import LightningSteps, Part
from memfit.integrations.lightning.training_step import TrainingStep
from memfit.job import Job
from memfit.live_state import LiveState
from memfit.observe.observer import StepObserver
from memfit.runtime.data_parallel import GradientAverage
from memfit.runtime.guard.attempts import Attempts
from memfit.runtime.guard.guard import Guard, GuardSettings
from memfit.runtime.guard.ranks import ranks_here
from memfit.runtime.guard.step_entry import StepEntry
from memfit.runtime.planned_steps import DoneStep
from memfit.session.batches import find_layout
from memfit.session.reachable import roots_of
from memfit.session.session import Session
from memfit.strategies.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What a callback asks of the loop."""

    guard: bool = True
    exact_windows: bool = False
    """Whether batches of one update count by their samples, short last windows included."""


class PlannedLoop:
    """Run the batches of a trainer under a plan.

    Args:
        step: the training step of the trainer's module.
        job: the training, as it is.
        plan: how.
        observer: measures steps.
        settings: what is asked for.
    """

    def __init__(
        self,
        step: TrainingStep,
        job: Job,
        plan: Plan,
        observer: StepObserver,
        settings: LoopSettings,
    ) -> None:
        self._step = step
        self._trainer = step.trainer
        self._settings = settings
        self._observer = observer
        self._loop = self._trainer.fit_loop.epoch_loop.automatic_optimization
        session = self._session(job)
        self._flags = [_flags(group) for group in session.optimizer.param_groups]
        self.steps = LightningSteps(step, session, plan, observer=observer)
        if self.steps.checks is not None:
            self.steps.checks.on_event = observer.event_of_next_step
        average = GradientAverage(session, broadcasts_buffers=True)
        self._average = average if self._trainer.world_size > 1 else None
        self.guard = guard = self._made_guard()
        if (
            guard is not None
        ):  # which looks at each step whether there are others, so nobody else has to
            self.steps.parameters = lambda: guard.parameters
        self._entry: StepEntry | None = None
        self._live: LiveState | None = None
        self._samples = self._first = 0
        self.on_other_phase: Callable[[Any], bool] = _never
        """Asked once an epoch, with a batch: whether another loop has taken this one's place."""
        self._epoch, self._is_new = -1, True
        self._log_trial = LogTrial(step, self.steps, self._snapshot)

    def _session(self, job: Job) -> Session:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        with self._step.metrics.replaced():
            layout = find_layout(job)
        return Session(
            job=job,
            device_type=self._trainer.strategy.root_device.type,
            layout=layout,
            model=self._step.module,
            optimizer=self._trainer.optimizers[0],
            gradient_pass=accumulate_gradients,
            micro_batch_size=job.batch_size,
            stateful={} if scaler is None else {"gradient_scaler": scaler},
        )

    def _made_guard(self) -> Guard | None:
        if not self._settings.guard:
            return None
        ranks = ranks_here()
        attempts = Attempts(self.steps, ranks, self._average)
        return Guard(self.steps, attempts, ranks, GuardSettings(), self._observer.event)

    @property
    def plan(self) -> Plan:
        """Return the plan in force; a guard may have taken a smaller one."""
        return self.steps.plan

    def begin(self) -> None:
        """Take the place of the loop's own ``run``."""
        self._loop.run = self.run

    def end(self) -> None:
        """Give the loop its own ``run`` back, and take the plan off the model."""
        vars(self._loop).pop("run", None)
        with self._step.metrics.replaced():
            self.steps.close()
        if self.guard is not None:
            self.guard.close()

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Run a batch, and the update where it is due, as ``_AutomaticOptimization.run`` does."""
        batch = next(iter(kwargs.values()))
        if self._is_new_phase(batch):
            result: dict[str, Any] = self._loop.run(optimizer, batch_idx, kwargs)
            return result
        try:
            done = self._run_batch(batch, batch_idx)
        except JobFunctionError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # what the module raised, as without a callback
        self._log_trial.after(batch, batch_idx)
        self._step.metrics.end_batch()
        self._step.logged.flush()
        if self.steps.is_skipped:
            return {}
        return self._step.result(done.loss)

    def _is_new_phase(self, batch: Any) -> bool:
        """Ask, at the first batch of each epoch, whether other parameters are trained now."""
        epoch = self._trainer.current_epoch
        if epoch == self._epoch or self.steps.window:
            return False
        self._epoch = epoch
        return self.on_other_phase(batch)

    def rehearse(self, batch: Any) -> None:
        """Try an update with the largest batch, find a plan under which it fits, undo all but that.

        Raises:
            OutOfMemoryAfterAllError: if it fits under no plan.
        """
        assert self.guard is not None, "what is rehearsed has to be undone"
        trainer, progress = self._trainer, Progress(self._loop.optim_progress)
        progress.keep()
        part = Part(-1, 0, self._divisor(), batch)
        self.steps.take(part, None)
        held, self.steps.sums = self.steps.sums, None
        if part.divisor > 1:
            self.steps.window.append(part)
            self.steps.snapshots.append(None)
        self.steps.accumulates = False
        try:
            with callbacks_muted(trainer):
                self.guard.rehearse(self.steps.window, trainer.global_step + 1)
        except OutOfMemoryAfterAllError:
            raise
        except MemfitError as error:
            msg = f"{error} Training begins without it."
            warnings.warn(msg, MemfitWarning, stacklevel=2)
        finally:
            progress.put_back()
            self.steps.end_window()
            for parameter, gradient in held or ():
                parameter.grad = gradient

    def clean_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Have the optimizer's groups say what they said before the plan was applied."""
        for state in checkpoint.get("optimizer_states", ()):
            for group, flags in zip(state.get("param_groups", ()), self._flags, strict=False):
                group.update(flags)

    def _run_batch(self, batch: Any, index: int) -> DoneStep:
        trainer, steps = self._trainer, self.steps
        done: DoneStep
        number = trainer.global_step + 1
        steps.accumulates = trainer.fit_loop._should_accumulate()
        is_first = not steps.window
        part = Part(trainer.fit_loop.epoch_loop.total_batch_idx, index, self._divisor(), batch)
        part = self._weighted(part, is_first=is_first)
        if self.guard is None:
            steps.take(part, None)
            done = steps.attempt(steps.window, self._average)
            seconds = 0.0
        else:
            steps.take(part, None if is_first else self._snapshot())
            if is_first:
                self._entry = self.guard.begin(number)
            assert self._entry is not None, "a window has begun"
            done, seconds = self.guard.run(self._entry, steps.window, number)
        if not steps.accumulates:
            self._end_window(number, seconds)
        return done

    def _end_window(self, number: int, seconds: float) -> None:
        if self.guard is not None and self._entry is not None:
            self.guard.end(self._entry, seconds)
        self._entry = None
        if len(self.steps.window) > 1 and self._is_new:
            # What was measured so far went before the optimizer's states were made.
            self._observer.peaks.begin_training()
        self._is_new = False
        samples = sum(num_rows(part.batch) for part in self.steps.window)
        self._observer.end_step(
            number,
            self.steps.window,
            plan=self.plan,
            num_samples=samples,
            micro_batch_size=self.steps.micro_batch_size,
        )
        self.steps.end_window()

    def _snapshot(self) -> Any:
        """Keep what a later batch of a window begins with, but for what the update changes."""
        with self._step.logged.collecting(), self._step.metrics.replaced():  # as it is restored
            return self._live_state().snapshot()

    def _live_state(self) -> LiveState:
        if self._live is None:
            session = self.steps.session
            large: list[torch.Tensor] = [*session.model.parameters()]
            states = (s.values() for s in session.optimizer.state.values() if isinstance(s, dict))
            large += [each for state in states for each in state if torch.is_tensor(each)]
            self._live = LiveState(roots_of(session), leave_out=large)
        return self._live

    def _divisor(self) -> float:
        """Return what Lightning divides a batch's loss by."""
        return float(self._trainer.accumulate_grad_batches)

    def _weighted(self, part: Part, *, is_first: bool) -> Part:
        """Have a batch count by its samples, if that is asked for.

        The first batch of a window sets the scale, and whole gradients are multiplied by what
        makes them the mean over all samples of the window.
        """
        self.steps.scale = 1.0
        if not self._settings.exact_windows or part.divisor == 1:
            return part
        samples = num_rows(part.batch)
        if is_first:
            self._first, self._samples = samples, 0
        self._samples += samples
        self.steps.scale = self._first * part.divisor / self._samples
        return part._replace(divisor=part.divisor * self._first / samples)


_FLAGS = ("fused", "foreach")
"""What a plan sets in the groups of an optimizer."""


def _flags(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in _FLAGS if name in group}


def _never(_: Any) -> bool:
    """Say that nothing has changed."""
    return False
