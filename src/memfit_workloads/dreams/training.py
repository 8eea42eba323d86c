"""One training under an ordinary Lightning Trainer, inside a memory budget."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import memfit
from memfit.errors import MissingExtraError, UsageError
from memfit.job import Job
from memfit.strategies import MicroBatching, base
from memfit.strategies.plan import in_catalogue_order
from memfit_workloads.planned_memory import PlannedMemory, devices, plan_memory

from .callbacks import DocumentRemedies, PlanInForce, StopOnNoNumber
from .data_module import DreamsData
from .settings import DreamsSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def job_of(settings: DreamsSettings, build: Callable[[], LightningModule], data: DreamsData) -> Job:
    """Describe a training step of the module to memfit: what Lightning does between two updates.

    Batches of ``--accumulate_grad_batches`` are one effective batch.
    """

    def model() -> torch.nn.Module:
        torch.manual_seed(settings.seed)
        module = build()
        return module.double() if settings.train_precision == "64" else module

    def loss(module: Any, batch: Any) -> torch.Tensor:
        if settings.train_precision != "bf16":
            return module.training_loss(batch)
        with torch.autocast(batch["spectra"].device.type, dtype=torch.bfloat16):
            return module.training_loss(batch)

    return Job(
        model=model,
        batch=data.largest_batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.Adam(
            parameters, lr=settings.lr, weight_decay=settings.weight_decay
        ),
        batch_size=min(settings.batch_size, data.num_train),
        clip_grad_norm=settings.gradient_clip_val or None,
        name="dreams",
    )


def plan_training(
    settings: DreamsSettings, build: Callable[[], LightningModule], data: DreamsData
) -> PlannedMemory:
    """Predict training as it is, and find the plan that Lightning's loop can carry out.

    Raises:
        NoPlanFitsError: if no plan keeps the step inside the budget.
    """
    refuse_precision(settings)
    job = job_of(settings, build, data)
    planned = plan_memory(job, settings.memory_settings, forbid=_not_offered())
    return _accumulated(settings, planned) if settings.accumulate_grad_batches > 1 else planned


def _accumulated(settings: DreamsSettings, planned: PlannedMemory) -> PlannedMemory:
    """Predict the whole window: gradients of its first batches are kept for the later ones.

    The plan that is attached stays; Lightning itself does the accumulation.
    """
    num_samples = planned.job.batch_size * settings.accumulate_grad_batches
    job = replace(planned.job, batch_size=num_samples)
    parts = MicroBatching(micro_batch_size=planned.job.batch_size)
    _, device = devices(settings.memory_settings.device)
    plain = memfit.predict(job, device=device, plan=memfit.Plan(strategies=(parts,)))
    whole = memfit.Plan(strategies=in_catalogue_order((*planned.plan.strategies, parts)))
    in_parts = memfit.predict(job, device=device, plan=whole)
    return replace(planned, plain=plain, planned=in_parts)


def _not_offered() -> list[str]:
    """Name the strategies that act where Lightning's loop does its own."""
    offered = {base.Seam.MODEL, base.Seam.OPTIMIZER, base.Seam.PROCESS}
    from memfit.strategies import CATALOGUE

    return [each.name for each in CATALOGUE if not each.seams <= offered]


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


def fit(
    settings: DreamsSettings,
    module: LightningModule,
    data: DreamsData,
    planned: PlannedMemory,
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
    in_force = PlanInForce(planned.plan)
    callbacks = [in_force, StopOnNoNumber(), DocumentRemedies(settings.remedies), *more]
    if folder is not None and settings.save_top_k:
        callbacks.append(_checkpoints(settings, folder))
    _set_up_process(settings)
    with _quiet():
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
    settings: DreamsSettings, device: str, callbacks: list[Callback], folder: Path | None
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
        callbacks=callbacks,
        logger=_logger(settings),
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
        os.environ["PYTORCH_ALLOC_CONF"] = remedies.allocator_settings
    if remedies.memory_fraction is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(remedies.memory_fraction)
    seed_everything(settings.seed, workers=True, verbose=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's advice on workers and loggers to itself; faults are raised all the same."""
    import logging

    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
