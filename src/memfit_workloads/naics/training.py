"""Training under an ordinary Lightning Trainer, inside a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from memfit.errors import MemfitError, UsageError
from memfit.integrations.lightning import MemfitCallback
from memfit.journal.folder import CONTINUE, OVERWRITE
from memfit_workloads.interruption import InterruptWatch
from memfit_workloads.lightning_messages import quiet_lightning
from memfit_workloads.lightning_plan import plan_under_lightning
from memfit_workloads.planned_memory import PlannedFigures, devices

from .checkpoints import LAST, Reached, StageCheckpoints
from .data_module import NaicsData
from .module import NaicsContrastive
from .sampling import Stage
from .settings import NaicsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a stage came to."""

    metrics: dict[str, float]
    measured_peak_bytes: int | None
    num_steps: int


def plan_training(
    settings: NaicsSettings, build: Callable[[], NaicsContrastive], data: NaicsData
) -> PlannedFigures:
    """Predict training as it is, and find or read the plan that it is run under.

    Raises:
        NoPlanFitsError: if no plan keeps an update inside the budget.
        UsageError: if the precision cannot be had.
    """
    run_device, _ = devices(settings.memory_settings.device)
    return plan_under_lightning(
        settings.memory_settings,
        lambda: trainer_of(settings, run_device),
        build(),
        data,
        as_it_is=True,
    )


def fit(
    settings: NaicsSettings,
    module: NaicsContrastive,
    data: NaicsData,
    planned: PlannedFigures,
    *,
    reached: Reached,
    folder: Path,
) -> Trained:
    """Train a module through one stage, or through what is left of it.

    Args:
        settings: what the run is told.
        module: what is trained; its weights are the trained ones afterwards.
        data: of the stage.
        planned: the plan.
        reached: how far the run has come.
        folder: of the stage's journal.

    Raises:
        MemfitError: if the loss is no number.
        KeyboardInterrupt: after Ctrl-C, once a checkpoint of the update under way is written.
    """
    is_begun = reached.epoch is not None
    checkpoint = settings.output_dir / "checkpoints" / LAST
    in_force = MemfitCallback(
        plan=planned.plan, folder=folder, earlier_run=CONTINUE if is_begun else OVERWRITE
    )
    every = settings.of("training.trainer.every_n_train_steps")
    data.begin_at(reached.epoch or 0, reached.num_steps)
    with InterruptWatch() as watch, quiet_lightning():
        seed_everything(settings.of("seed"), workers=True, verbose=False)
        saving = StageCheckpoints(checkpoint, every, reached, in_force, watch)
        callbacks: list[Any] = [in_force, _StopOnNoNumber(), saving]
        trainer = trainer_of(settings, planned.run_device, data.stage, callbacks)
        trainer.fit(module, datamodule=data, ckpt_path=str(checkpoint) if is_begun else None)
    if watch.is_requested:
        raise KeyboardInterrupt
    peaks = [each for each in (reached.peak_bytes, in_force.measured_peak_bytes) if each]
    return Trained(
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        measured_peak_bytes=max(peaks, default=None),
        num_steps=trainer.global_step,
    )


def trainer_of(
    settings: NaicsSettings,
    device: str,
    stage: Stage | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """Return the Trainer of a stage.

    Raises:
        UsageError: if the precision cannot be had on the device.
    """
    given = settings.of("training.trainer")
    if str(given["precision"]).startswith("16") and device == "cpu":
        msg = (
            f"training.trainer.precision is {given['precision']}: fp16 has no kernels for training "
            "on the CPU. Use --set training.trainer.precision=32-true, or bf16-mixed."
        )
        raise UsageError(msg)
    epochs = given["max_epochs"]
    # A chain says how many epochs each of its stages takes.
    epochs = stage.max_epochs if stage is not None and stage.max_epochs is not None else epochs
    return Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        max_epochs=epochs,
        max_steps=given["max_steps"],
        precision=given["precision"],
        accumulate_grad_batches=given["accumulate_grad_batches"],
        gradient_clip_val=given["gradient_clip_val"] or None,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class _StopOnNoNumber(Callback):
    """End a training whose loss is no number."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the loss."""
        del pl_module, batch
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if not torch.isfinite(loss).all():
            msg = (
                f"The loss is {float(loss.detach())} in step {trainer.global_step} (batch "
                f"{batch_idx}). Lower training.learning_rate or loss.max_norm, or raise "
                "loss.temperature; no final model was written."
            )
            raise MemfitError(msg)
