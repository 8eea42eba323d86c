"""Takes the place of Lightning's automatic optimization for as long as a plan is in force."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from memfit.comparison.gradients import accumulate_gradients
from memfit.errors import MemfitWarning
from memfit.integrations.batches import num_rows
from memfit.integrations.lightning.framework import Progress, callbacks_muted
from memfit.integrations.lightning.joins import Pieces
from memfit.integrations.lightning.steps import LightningSteps, Part
from memfit.integrations.lightning.training_step import TrainingStep
from memfit.integrations.windows import PlannedWindows, as_without_a_plan, flags_of, set_flags
from memfit.job import Job
from memfit.live_state import Snapshot
from memfit.observe.observer import StepObserver
from memfit.runtime.data_parallel import GradientAverage
from memfit.runtime.planned_steps import DoneStep
from memfit.session.batches import find_layout
from memfit.session.deterministic_draws import DeterministicDraws, untouched_randomness
from memfit.session.session import Session
from memfit.strategies.facts import BatchNorm
from memfit.strategies.plan import Plan

_MOST_SAMPLES, _PIECE = 10, 4
"""Pieces of four samples, four and two."""
_ROUNDING, _NO_YARDSTICK = 1e-5, 1e-2
_DUE = frozenset(2**n for n in range(8)) | {0}
"""Batches after which ranks try together; what one of them finds open is not asked."""


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
        self._log_trial = _LogTrial(step, self.steps, self._snapshot)

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


class _LogTrial:
    """Find out of each logged value whether it is a mean over samples, a sum or something else.

    Costs two forwards of ten samples without gradients, at most eight times, and only where batches
    are cut. Random draws are made deterministic, batch normalisation takes its running statistics,
    and all that a forward changes is put back.

    Args:
        step: of the trainer's module.
        steps: that run it under a plan.
        snapshot: keeps what a forward may change.
    """

    def __init__(
        self, step: TrainingStep, steps: LightningSteps, snapshot: Callable[[], Any]
    ) -> None:
        self._step, self._steps, self._snapshot = step, steps, snapshot
        self._told: set[str] = set()
        self._has_failed = False

    def after(self, batch: Any, index: int) -> None:
        """Try a batch that has been run, if it is open how its pieces are put together."""
        if self._has_failed or not self._is_due():
            return
        try:
            self._try(batch, index)
        except Exception as error:  # noqa: BLE001 - a trial may not end a training
            self._has_failed = True
            warnings.warn(_UNTRIED.format(f"{type(error).__name__}: {error}"), MemfitWarning, 2)
            return
        failed = [name for name in self._step.logged.joins.failed if name not in self._told]
        if failed:
            self._told.update(failed)
            names = ", ".join(map(repr, failed))
            warnings.warn(_NO_WAY.format(names), MemfitWarning, stacklevel=2)

    def _is_due(self) -> bool:
        trainer = self._step.trainer
        if trainer.world_size > 1:  # a step may speak to the other ranks
            return trainer.fit_loop.epoch_loop.total_batch_idx in _DUE
        return self._step.logged.is_to_be_tried()

    def _try(self, batch: Any, index: int) -> None:
        layout, step = self._steps.session.layout, self._step
        few, num_samples = next(iter(layout.split(batch, _MOST_SAMPLES)))
        size = _PIECE if num_samples > _PIECE else max(1, num_samples // 2)
        pieces = [*layout.split(few, size)]
        if len(pieces) < 2:
            return
        step.batch_index = index
        with step.logged.trying() as logged, self._undone():
            losses = [self._loss(each) for each in (few, *(piece for piece, _ in pieces))]
        counts = [count for _, count in pieces]
        loss = Pieces(losses[1:], {"samples": counts}).mean("samples")
        noise = abs(float(loss - losses[0])) / max(abs(float(losses[0])), 1e-30)
        if noise > _NO_YARDSTICK:
            return  # the loss itself is no mean here, by rounding or by draws that are not seen
        self._compare(logged, _ROUNDING + 10 * noise)

    def _compare(self, logged: Any, tolerance: float) -> None:
        whole, *others = logged
        for key, each in whole.items():
            found = self._step.logged.joins.of(key)
            value = each.values[0]
            if found.is_settled or not isinstance(value, (int, float, torch.Tensor)):
                continue
            if not all(key in other for other in others):
                continue
            parts = [other[key] for other in others]
            counts = {by: [part.counts[by][0] for part in parts] for by in parts[0].counts}
            found.take(value, Pieces([part.values[0] for part in parts], counts), tolerance)
            if "sizes" in counts:
                found.sizes_add_up = sum(counts["sizes"]) == each.counts["sizes"][0]

    def _loss(self, batch: Any) -> torch.Tensor:
        with untouched_randomness(), DeterministicDraws(), torch.no_grad():
            return self._step(self._step.module, batch)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Put back all that forwards change, and compute in full precision where that is free."""
        before = self._snapshot()
        try:
            with ExitStack() as stack:
                stack.enter_context(self._step.metrics.replaced())
                stack.enter_context(self._step.on_trial())
                stack.enter_context(self._steps.as_before())
                stack.enter_context(_without_autocast(self._step.trainer))
                stack.enter_context(_statistics_given(self._step.module))
                yield
        finally:
            with self._step.metrics.replaced():
                before.restore()


def _without_autocast(trainer: Any) -> AbstractContextManager[Any]:
    plugin = trainer.precision_plugin
    if any(kind.__name__ == "MixedPrecision" for kind in type(plugin).__mro__):
        return patch.object(plugin, "train_step_context", nullcontext)
    return nullcontext()


@contextmanager
def _statistics_given(module: torch.nn.Module) -> Iterator[None]:
    norms = [each for each in module.modules() if isinstance(each, BatchNorm) and each.training]
    for each in norms:
        each.training = False
    try:
        yield
    finally:
        for each in norms:
            each.training = True


_NO_WAY = (
    "training_step logs {}, which for a batch is neither a mean over its samples, nor the "
    "exponential, root or logarithm of one, nor a sum or an extreme. Where the plan cuts batches, "
    "what is logged is the mean of its pieces. Weights are not concerned. Log a metric of "
    "torchmetrics instead, or forbid the strategies that cut."
)
_UNTRIED = (
    "How the values that training_step logs for pieces of a batch make up those of the whole batch "
    "could not be tried ({}). They are taken for means over samples, or for what reduce_fx says."
)
