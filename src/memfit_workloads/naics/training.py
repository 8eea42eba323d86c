"""Training under an ordinary Lightning Trainer, inside a memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

import memfit
from memfit.errors import MemfitError, UsageError
from memfit.integrations.lightning import MemfitCallback, plan, predict
from memfit_workloads.lightning_messages import quiet_lightning
from memfit_workloads.planned_memory import PlannedFigures, devices

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
    memory = settings.memory_settings
    run_device, device = devices(memory.device)
    module = build()
    with quiet_lightning():
        plain = predict(trainer_of(settings, run_device), module, data, device=device)
        budget_bytes = memory.budget_beside(plain.bounded_bytes())
        if memory.plan_file is not None:
            found: memfit.Plan = memfit.Plan.load(memory.plan_file)
        elif budget_bytes is None and not memory.allow:
            found = memfit.Plan(device=device).with_prediction(plain)
        else:
            found = plan(
                trainer_of(settings, run_device),
                module,
                data,
                device=device,
                budget=budget_bytes,
                allow=list(memory.allow),
                require=list(memory.require),
            )
        prediction = found.prediction if memory.plan_file is None else None
        if prediction is None:
            trainer = trainer_of(settings, run_device)
            prediction = predict(trainer, module, data, plan=found, device=device)
            found = found.with_prediction(prediction)
    return PlannedFigures(
        plan=found,
        plain=plain,
        planned=prediction,
        budget_bytes=budget_bytes,
        run_device=run_device,
    )


def fit(
    settings: NaicsSettings,
    module: NaicsContrastive,
    data: NaicsData,
    planned: PlannedFigures,
    folder: Path,
) -> Trained:
    """Train a module through one stage; its weights are the trained ones afterwards.

    Raises:
        MemfitError: if the loss is no number.
    """
    in_force = MemfitCallback(plan=planned.plan, folder=folder)
    with quiet_lightning():
        seed_everything(settings.of("seed"), workers=True, verbose=False)
        trainer = trainer_of(
            settings, planned.run_device, data.stage, [in_force, _StopOnNoNumber()]
        )
        trainer.fit(module, datamodule=data)
    return Trained(
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        measured_peak_bytes=in_force.measured_peak_bytes,
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
