"""Tries on a few samples how what pieces log makes up what the whole batch logs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from memfit.errors import MemfitWarning
from memfit.integrations.lightning.joins import Pieces
from memfit.integrations.lightning.steps import LightningSteps
from memfit.integrations.lightning.training_step import TrainingStep
from memfit.session.deterministic_draws import DeterministicDraws, untouched_randomness
from memfit.strategies.facts import BatchNorm

_MOST_SAMPLES, _PIECE = 10, 4
"""Pieces of four samples, four and two."""
_ROUNDING, _NO_YARDSTICK = 1e-5, 1e-2
_DUE = frozenset(2**n for n in range(8)) | {0}
"""Batches after which ranks try together; what one of them finds open is not asked."""


class LogTrial:
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
