"""Takes the place of Lightning's automatic optimization for as long as a plan is in force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memfit.comparison.gradients import accumulate_gradients
from memfit.integrations.lightning.batches import num_rows
from memfit.integrations.lightning.framework import Progress, callbacks_muted
from memfit.integrations.lightning.log_trial import LogTrial
from memfit.integrations.lightning.steps import LightningSteps, Part
from memfit.integrations.lightning.training_step import TrainingStep
from memfit.integrations.windows import PlannedWindows, as_without_a_plan, flags_of, set_flags
from memfit.job import Job
from memfit.live_state import Snapshot
from memfit.observe.observer import StepObserver
from memfit.runtime.data_parallel import GradientAverage
from memfit.runtime.planned_steps import DoneStep
from memfit.session.batches import find_layout
from memfit.session.session import Session
from memfit.strategies.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What a callback asks of the loop."""

    guard: bool = True
    exact_windows: bool = False
    """Whether batches of one update count by their samples, short last windows included."""


class PlannedLoop(PlannedWindows[LightningSteps]):
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
        self._step, self._trainer, self._settings = step, step.trainer, settings
        self._loop = self._trainer.fit_loop.epoch_loop.automatic_optimization
        session = self._session(job)
        self._flags = flags_of(session.optimizer.param_groups)
        steps = LightningSteps(step, session, plan, observer=observer)
        has_ranks = self._trainer.world_size > 1
        average = GradientAverage(session, broadcasts_buffers=True) if has_ranks else None
        super().__init__(steps, observer, guards=settings.guard, average=average)
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

    def begin(self) -> None:
        """Take the place of the loop's own ``run``."""
        self._loop.run = self.run

    def end(self) -> None:
        """Give the loop its own ``run`` back, and take the plan off the model."""
        vars(self._loop).pop("run", None)
        with self._step.metrics.replaced():
            super().end()

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        """Run a batch, and the update where it is due, as ``_AutomaticOptimization.run`` does."""
        batch = next(iter(kwargs.values()))
        if self._is_new_phase(batch):
            result: dict[str, Any] = self._loop.run(optimizer, batch_idx, kwargs)
            return result
        with as_without_a_plan():
            done = self._run_batch(batch, batch_idx)
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
                self._rehearse_window(trainer.global_step + 1)
        finally:
            progress.put_back()
            for parameter, gradient in held or ():
                parameter.grad = gradient

    def clean_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Have the optimizer's groups say what they said before the plan was applied."""
        for state in checkpoint.get("optimizer_states", ()):
            set_flags(state.get("param_groups", ()), self._flags)

    def _run_batch(self, batch: Any, index: int) -> DoneStep:
        trainer, steps = self._trainer, self.steps
        number = trainer.global_step + 1
        steps.accumulates = trainer.fit_loop._should_accumulate()
        part = Part(trainer.fit_loop.epoch_loop.total_batch_idx, index, self._divisor(), batch)
        done, seconds = self._run_part(self._weighted(part), number)
        if not steps.accumulates:
            self._end_window(number, seconds)
        return done

    def _end_window(self, number: int, seconds: float) -> None:
        self._log_window(seconds)
        window = self.steps.window
        if len(window) > 1 and self._is_new:
            # What was measured so far went before the optimizer's states were made.
            self._observer.peaks.begin_training()
        self._is_new = False
        self._report_window(number, window, sum(num_rows(part.batch) for part in window))

    def _snapshot(self) -> Snapshot:
        """Keep what a later batch of a window begins with, but for what the update changes."""
        with self._step.logged.collecting(), self._step.metrics.replaced():  # as it is restored
            return super()._snapshot()

    def _divisor(self) -> float:
        """Return what Lightning divides a batch's loss by."""
        return float(self._trainer.accumulate_grad_batches)

    def _weighted(self, part: Part) -> Part:
        """Have a batch count by its samples, if that is asked for.

        The first batch of a window sets the scale, and whole gradients are multiplied by what
        makes them the mean over all samples of the window.
        """
        self.steps.scale = 1.0
        if not self._settings.exact_windows or part.divisor == 1:
            return part
        samples = num_rows(part.batch)
        if not self.steps.window:
            self._first, self._samples = samples, 0
        self._samples += samples
        self.steps.scale = self._first * part.divisor / self._samples
        return part._replace(divisor=part.divisor * self._first / samples)


def _never(_: Any) -> bool:
    """Say that nothing has changed."""
    return False
