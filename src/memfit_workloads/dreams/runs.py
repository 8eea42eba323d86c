"""Pre-training and fine-tuning as whole runs, with their files and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memfit.errors import MissingExtraError
from memfit.reports.run_contents import read_report
from memfit.reports.run_page import write_run_page
from memfit.reports.training import Training, write_training
from memfit_workloads.planned_memory import PlannedFigures, peaks_line, planning, show_plan
from memfit_workloads.run_files import RunFiles

from .checkpoints import FINAL, load_backbone, pre_trained_sizes, save_model
from .data_module import rows_of
from .finetuning import DreamsFinetuning
from .inputs import (
    Labelled,
    Spectra,
    finetuning_data,
    pretraining_data,
    read_inputs,
    read_labels,
    split_labelled,
)
from .pretraining import DreamsPretraining
from .probing import begin_at_probe
from .schedule import Schedule
from .settings import DreamsSettings, settings_json
from .training import Trained, fit, plan_training

if TYPE_CHECKING:
    from rich.console import Console

RESULTS, FOLDS = "results.json", "folds.json"


def pretrain(settings: DreamsSettings, console: Console) -> dict[str, Any]:
    """Pre-train on masked peaks and retention order."""
    settings = with_pre_trained_sizes(settings)
    spectra = read_inputs(settings, console)
    data, train_rows, val_rows = pretraining_data(settings, spectra)

    def build() -> DreamsPretraining:
        module = DreamsPretraining(
            settings.sizes, schedule_of(settings), trim_padding=settings.trim_padding
        )
        return _started_from(module, settings)

    planned, trained = _train(settings, console, spectra, build, data)
    baselines = _pretraining_baselines(settings, spectra, train_rows, data)
    save_model(settings.output_dir / FINAL, trained.module, settings.train_objective, 1)
    own = {"num_train": len(train_rows), "num_val": len(val_rows)}
    metrics = {**trained.metrics, **baselines}
    return finish(settings, console, planned, trained, metrics=metrics, own=own)


def finetune(settings: DreamsSettings, console: Console) -> dict[str, Any]:
    """Fine-tune on one objective."""
    settings = with_pre_trained_sizes(settings)
    spectra = read_inputs(settings, console)
    given = read_labels(settings, spectra)
    train, val = split_labelled(settings, spectra, given)
    data = finetuning_data(settings, spectra, given, train, val)
    build = finetuning_builder(settings, given, train)
    begin = probing(settings, spectra, given, train)
    planned, trained = _train(settings, console, spectra, build, data, begin=begin)
    save_model(
        settings.output_dir / FINAL, trained.module, settings.train_objective, settings.head_depth
    )
    own = {"num_train": len(train), "num_val": len(val)}
    return finish(settings, console, planned, trained, metrics=trained.metrics, own=own)


def with_pre_trained_sizes(settings: DreamsSettings) -> DreamsSettings:
    """Take the sizes of the pre-trained backbone, where one is given."""
    if settings.pre_trained_pth is None:
        return settings
    return replace(settings, sizes=pre_trained_sizes(settings.pre_trained_pth, settings.sizes))


def schedule_of(settings: DreamsSettings) -> Schedule:
    """Return the learning rate's course."""
    return Schedule(
        lr=settings.lr, warmup_steps=settings.warmup_steps, weight_decay=settings.weight_decay
    )


def finetuning_builder(
    settings: DreamsSettings, given: Labelled, train: list[int]
) -> Callable[[], DreamsFinetuning]:
    """Return what builds the module; scales are those of the training labels."""

    def build() -> DreamsFinetuning:
        module = DreamsFinetuning(
            settings.sizes,
            given.objective,
            schedule_of(settings),
            head_depth=settings.head_depth,
            train_labels=given.labels[train],
            unfreeze_at_epoch=settings.unfreeze_backbone_at_epoch,
            num_frozen_layers=settings.frozen_layers,
            focal_gamma=settings.focal_gamma,
            trim_padding=settings.trim_padding,
        )
        return _started_from(module, settings)

    return build


def probing(
    settings: DreamsSettings, spectra: Spectra, given: Labelled, train: list[int]
) -> Callable[[Any], dict[str, float]]:
    """Return what sets a module's head before training, where that was asked for, and says how."""

    def begin(module: Any) -> dict[str, float]:
        if not settings.probe or settings.resume_from_checkpoint is not None:
            return {}
        rows = rows_of(spectra.ms_data, [given.rows[i] for i in train], settings.max_peaks_n)
        molecules = [given.molecules[i] for i in train]
        labels = given.labels[train]
        return {"probe": begin_at_probe(module, rows, labels, molecules, settings.probe)}

    return begin


def _started_from(module: Any, settings: DreamsSettings) -> Any:
    if settings.pre_trained_pth is not None:
        load_backbone(module.backbone, settings.pre_trained_pth)
    return module


def _train(
    settings: DreamsSettings,
    console: Console,
    spectra: Spectra,
    build: Any,
    data: Any,
    *,
    begin: Callable[[Any], Any] | None = None,
) -> tuple[PlannedFigures, Trained]:
    """Plan, make the folder ready, and train."""
    with planning(console):
        planned = plan_training(settings, at_its_largest(settings, build), data)
    show_plan(planned, console)
    begin_folder(settings, {**spectra.to_json(), **planned.to_json()}, planned)
    torch.manual_seed(settings.seed)
    module = build()
    if begin is not None:
        begin(module)
    return planned, fit(settings, module, data, planned, folder=settings.output_dir)


def at_its_largest(settings: DreamsSettings, build: Callable[[], Any]) -> Callable[[], Any]:
    """Return what builds the module with all unfrozen that the run ever frees: its largest step."""

    def built() -> Any:
        module = build()
        is_freed = settings.unfreeze_backbone_at_epoch < settings.max_epochs
        if isinstance(module, DreamsFinetuning) and is_freed:
            module.unfreeze_all()
        return module

    return built


def run_files(settings: DreamsSettings) -> RunFiles:
    """Return where the run's files lie."""
    return RunFiles(
        root=settings.output_dir,
        checkpoints=settings.output_dir / "checkpoints",
        own=(FINAL, RESULTS, FOLDS, "embeddings.npz", "similarity.csv", "embedding.png"),
        final=(FINAL, RESULTS),
        resume_flag="--resume_from_checkpoint FILE",
    )


def begin_folder(
    settings: DreamsSettings, told: dict[str, Any], planned: PlannedFigures | None
) -> None:
    """Make the run folder ready and write what is known before the first step."""
    files = run_files(settings)
    if settings.resume_from_checkpoint is None:
        files.begin(overwrite=settings.overwrite)
    else:
        files.resume()
    files.write_json("config.json", {"settings": settings_json(settings), "data_and_plan": told})
    if planned is not None:
        planned.plan.save(files.root / "plan.yaml")


def finish(
    settings: DreamsSettings,
    console: Console,
    planned: PlannedFigures,
    trained: Trained,
    *,
    metrics: dict[str, Any],
    own: dict[str, Any],
) -> dict[str, Any]:
    """Write and say what came of a training, and return what ``--json`` ends with."""
    metrics = {name: plain_figure(value) for name, value in metrics.items()}
    result = {
        "workload": "dreams",
        "regime": settings.regime,
        "metrics": metrics,
        **own,
        **planned.to_json(),
        "measured_peak_bytes": trained.measured_peak_bytes,
        "num_steps": trained.num_steps,
        "run_folder": str(settings.output_dir),
    }
    run_files(settings).write_json(RESULTS, result)
    _report(settings, planned, trained, metrics, console)
    scores = ", ".join(f"{name} {value}" for name, value in metrics.items())
    lines = [scores, peaks_line(planned, trained.measured_peak_bytes)]
    lines.append(f"run folder: {settings.output_dir} ({FINAL}, {RESULTS}, plan.yaml)")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    return result


def _report(
    settings: DreamsSettings,
    planned: PlannedFigures,
    trained: Trained,
    metrics: dict[str, Any],
    console: Console,
) -> None:
    """Write training.json, and report.html where that can be drawn and a journal is there."""
    if settings.folds is not None:
        return  # many trainings, no journal of one
    training = Training(
        title="DreaMS",
        command=settings.command,
        budget_bytes=planned.budget_bytes,
        plain=planned.plain,
        planned=planned.planned,
        considered=planned.considered,
        run_peak_bytes=trained.measured_peak_bytes,
        results=metrics,
    )
    write_training(settings.output_dir, training)
    try:
        write_run_page(read_report(settings.output_dir))
    except MissingExtraError as error:
        console.print(f"No report.html: {error}", markup=False, soft_wrap=True)


def plain_figure(value: Any) -> Any:
    """Round a figure for JSON; what is no number is None."""
    if isinstance(value, (float, np.floating)):
        return round(float(value), 6) if np.isfinite(value) else None
    return value


def _pretraining_baselines(
    settings: DreamsSettings, spectra: Spectra, train_rows: list[int], data: Any
) -> dict[str, float]:
    """Return what is reached without learning from a spectrum.

    ``frequency_top1``: always the most frequent class of the training peaks. ``logistic_order``: a
    logistic regression on the precursors' m/z and charges of a pair.
    """
    from .baselines import frequency_top1, order_by_precursor

    loader = data.val_dataloader()
    if not loader:
        return {}
    train = rows_of(spectra.ms_data, train_rows, settings.max_peaks_n)
    return {
        "frequency_top1": frequency_top1(train, list(loader), settings.sizes),
        "logistic_order_accuracy": order_by_precursor(data),
    }
