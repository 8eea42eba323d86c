"""One training under an ordinary Lightning Trainer, inside a memory budget."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import memfit
from memfit.errors import MissingExtraError, UsageError
from memfit.integrations.lightning import MemfitCallback, predict
from memfit.strategies import ActivationCheckpointing
from memfit_workloads.lightning_messages import quiet_lightning
from memfit_workloads.lightning_plan import plan_under_lightning
from memfit_workloads.planned_memory import PlannedFigures, devices

from .callbacks import DocumentRemedies, StopOnNoNumber
from .data_module import DreamsData
from .settings import DreamsSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

_OLDER_ALLOCATOR_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Read in the place of PYTORCH_ALLOC_CONF where they are set (torch 2.13)."""
_PRECISIONS: dict[str, Any] = {
    "64": "64-true",
    "32": "32-true",
    "bf16": "bf16-mixed",
    "16": "16-mixed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training came to."""

    module: Any
    metrics: dict[str, float]
    measured_peak_bytes: int | None
    num_steps: int


def plan_training(
    settings: DreamsSettings, build: Callable[[], LightningModule], data: DreamsData
) -> PlannedFigures:
    """Predict training as it is, and find or read the plan that it is run under.

    Both are asked of a Trainer like the one that trains, for the time when all that ever learns
    does.

    Raises:
        NoPlanFitsError: if no plan keeps an update inside the budget.
        UsageError: if the precision cannot be had.
    """
    refuse_precision(settings)
    refuse_devices(settings)
    run_device, _ = devices(settings.memory_settings.device)
    torch.manual_seed(settings.seed)
    return plan_under_lightning(
        settings.memory_settings, lambda: _trainer(settings, run_device), build(), data
    )


def given_plan(
    settings: DreamsSettings, build: Callable[[], LightningModule], data: DreamsData
) -> PlannedFigures:
    """Predict training under what its flags ask for alone, without looking for a plan."""
    refuse_precision(settings)
    refuse_devices(settings)
    run_device, device = devices(settings.memory_settings.device)
    strategies = (ActivationCheckpointing(),) if settings.memory_settings.require else ()
    own = memfit.Plan(strategies=strategies, device=device)
    torch.manual_seed(settings.seed)
    with quiet_lightning():
        found = predict(_trainer(settings, run_device), build(), data, plan=own, device=device)
    return PlannedFigures(
        plan=own.with_prediction(found),
        plain=found,
        planned=found,
        budget_bytes=None,
        run_device=run_device,
    )


def refuse_precision(settings: DreamsSettings) -> None:
    """Refuse 16 bit where there is no GPU.

    Raises:
        UsageError: then.
    """
    if settings.train_precision == "16" and not torch.cuda.is_available():
        msg = (
            "--train_precision 16 needs a GPU: fp16 has no kernels for training on the CPU. Use "
            "--train_precision bf16."
        )
        raise UsageError(msg)


def refuse_devices(settings: DreamsSettings) -> None:
    """Refuse several devices, whose processes would each run the whole command.

    Raises:
        UsageError: then.
    """
    if settings.num_devices > 1:
        msg = (
            f"--num_devices {settings.num_devices} cannot be had: Lightning starts the whole "
            "command again for each device, and all of them would write the same folder. Use "
            "--num_devices 1, and one run with a seed or fold of its own on each device."
        )
        raise UsageError(msg)


def fit(
    settings: DreamsSettings,
    module: LightningModule,
    data: DreamsData,
    planned: PlannedFigures,
    *,
    folder: Path | None,
    more: Sequence[Callback] = (),
) -> Trained:
    """Train a module under a plan.

    Args:
        settings: what the run is told.
        module: what is trained; its weights are the trained ones afterwards.
        data: its batches.
        planned: the plan.
        folder: where checkpoints go; None keeps none.
        more: further callbacks.

    Raises:
        MemfitError: if the loss is no number.
    """
    in_force = MemfitCallback(
        plan=planned.plan, worst_phase=True, find_leaks=folder is not None, folder=folder
    )
    callbacks: list[Any] = [in_force, StopOnNoNumber(), DocumentRemedies(settings.remedies), *more]
    if folder is not None and settings.save_top_k:
        callbacks.append(_checkpoints(settings, folder))
    _set_up_process(settings)
    with quiet_lightning():
        trainer = _trainer(settings, planned.run_device, callbacks, folder)
        resumed = settings.resume_from_checkpoint
        trainer.fit(module, datamodule=data, ckpt_path=None if resumed is None else str(resumed))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    module.cpu()
    return Trained(
        module=module,
        metrics=metrics,
        measured_peak_bytes=in_force.measured_peak_bytes,
        num_steps=trainer.global_step,
    )


def _trainer(
    settings: DreamsSettings,
    device: str,
    callbacks: Sequence[Callback] = (),
    folder: Path | None = None,
) -> Trainer:
    return Trainer(
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=settings.num_devices,
        max_epochs=settings.max_epochs,
        precision=_PRECISIONS[settings.train_precision],
        accumulate_grad_batches=settings.accumulate_grad_batches,
        gradient_clip_val=settings.gradient_clip_val or None,
        val_check_interval=settings.val_check_interval,
        limit_val_batches=settings.val_batches,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        logger=_logger(settings) if callbacks else False,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
    )


def _checkpoints(settings: DreamsSettings, folder: Path) -> ModelCheckpoint:
    every = settings.every_n_train_steps
    return ModelCheckpoint(
        dirpath=folder / "checkpoints",
        monitor="val_loss" if every is None else None,
        # Without a score to rank by, Lightning keeps the newest alone.
        save_top_k=settings.save_top_k if every is None else 1,
        every_n_train_steps=every,
        save_last=every is None,
    )


def _logger(settings: DreamsSettings) -> Any:
    if settings.wandb_project is None:
        return False
    try:
        import wandb  # noqa: F401 - whether it is there
    except ImportError:
        raise MissingExtraError("--wandb_project", "wandb", "wandb") from None
    from lightning.pytorch.loggers import WandbLogger

    return WandbLogger(project=settings.wandb_project, save_dir=str(settings.output_dir))


def _set_up_process(settings: DreamsSettings) -> None:
    """Do what has to be done before a GPU is used."""
    remedies = settings.remedies
    if remedies.allocator_settings and not torch.cuda.is_initialized():
        for older_name in _OLDER_ALLOCATOR_NAMES:
            os.environ.pop(older_name, None)
        os.environ["PYTORCH_ALLOC_CONF"] = remedies.allocator_settings
    if remedies.memory_fraction is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(remedies.memory_fraction)
    seed_everything(settings.seed, workers=True, verbose=False)
