"""Lightning callbacks: the plan and its peak, divergence, and what the document does each step."""

from __future__ import annotations

import gc
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import memfit
from memfit.errors import MemfitError
from memfit.observe.peaks import Peaks, peaks_on

from .memory_log import log_memory_usage
from .settings import Remedies


class PlanInForce(Callback):
    """Apply a plan to the module and its optimizer before the first step, and measure peaks."""

    def __init__(self, plan: memfit.Plan) -> None:
        self._plan = plan
        self._attached: memfit.Attached | None = None
        self._peaks = Peaks()

    @property
    def measured_peak_bytes(self) -> int | None:
        """Return the highest peak of the steps that were measured."""
        return self._peaks.highest_peak_bytes

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the plan; optimizer and device are settled by now."""
        (optimizer,) = trainer.optimizers
        self._attached = memfit.attach(pl_module, optimizer, self._plan)
        if self._attached.optimizer is not optimizer:
            trainer.strategy.optimizers = [self._attached.optimizer]
        self._peaks = peaks_on(pl_module.device.type)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Watch a step from here, where that is due; a window of several batches is one step."""
        del pl_module
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._peaks.begin(_bytes_of(batch), None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the watch, and drop gradients that Lightning keeps through the next forward."""
        del pl_module, outputs, batch
        is_last = batch_idx + 1 == trainer.num_training_batches
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or is_last:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
            self._peaks.account(self._peaks.end(), 0.0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the plan off."""
        del trainer, pl_module
        if self._attached is not None:
            self._attached.detach()
        self._peaks.close()


class StopOnNoNumber(Callback):
    """End a run whose loss is no number, before anything final is written."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the loss.

        Raises:
            MemfitError: if it is NaN or infinite.
        """
        del pl_module, batch
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if not torch.isfinite(loss).all():
            msg = (
                f"The loss is {float(loss)} in epoch {trainer.current_epoch + 1}, batch "
                f"{batch_idx + 1}. No final model is written. Lower --lr, or raise --warmup_steps."
            )
            raise MemfitError(msg)


class DocumentRemedies(Callback):
    """Do after each step what the document does; none of it lowers the peak of a step."""

    def __init__(self, remedies: Remedies) -> None:
        self._remedies = remedies
        self._num_steps = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Delete, collect, empty and log where that is due."""
        del trainer, pl_module, outputs, batch_idx
        remedies = self._remedies
        self._num_steps += 1
        if remedies.delete_batches and isinstance(batch, dict):
            batch.clear()
        if self._is_due(remedies.gc_every):
            gc.collect()
        if self._is_due(remedies.empty_cache_every) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._is_due(remedies.log_memory_every):
            log_memory_usage()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Empty the cache after validation, where emptying was asked for."""
        del trainer, pl_module
        if self._remedies.empty_cache_every and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self._num_steps % every == 0


def _bytes_of(batch: Any) -> int:
    values = batch.values() if isinstance(batch, dict) else batch
    return sum(each.nbytes for each in values if isinstance(each, torch.Tensor))
