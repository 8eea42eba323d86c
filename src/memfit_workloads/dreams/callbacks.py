"""Lightning callbacks: divergence, and what the document does after each step."""

from __future__ import annotations

import gc
import resource
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from memfit.errors import MemfitError
from memfit.units import format_bytes

from .settings import Remedies


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
        del trainer, pl_module, batch_idx
        remedies = self._remedies
        self._num_steps += 1
        if remedies.delete_batches:
            # As the document does it: two names of this call are dropped, and the loop keeps its
            # own. Emptying what the loop still holds would break windows of several batches.
            del batch, outputs
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


def log_memory_usage() -> str:
    """Say how much memory is held now, write it to standard error, and return the line.

    On a GPU: what tensors hold, and what the allocator keeps in its cache. On the CPU: the largest
    size that the process has reached.
    """
    if torch.cuda.is_available():
        allocated = format_bytes(torch.cuda.memory_allocated())
        cached = format_bytes(torch.cuda.memory_reserved())
        line = f"GPU Memory - Allocated: {allocated}, Cached: {cached}"
    else:
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Linux counts in KiB, macOS in bytes.
        num_bytes = kibibytes if sys.platform == "darwin" else kibibytes * 1024
        line = f"Host memory - Highest: {format_bytes(num_bytes)}"
    sys.stderr.write(line + "\n")
    return line
