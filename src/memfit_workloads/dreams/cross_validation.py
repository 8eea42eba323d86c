"""Fine-tuning in folds that share no molecule, beside logistic regression."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memfit_workloads.planned_memory import show_plan

from .data_module import in_batches, rows_of
from .folds import auroc, binned, grouped_folds, logistic_scores
from .inputs import Labelled, Spectra, finetuning_data, read_inputs, read_labels
from .objectives import BINARY
from .runs import (
    FOLDS,
    at_its_largest,
    begin_folder,
    finetuning_builder,
    finish,
    plain_figure,
    probing,
    run_files,
    with_pre_trained_sizes,
)
from .settings import DreamsSettings
from .training import Trained, fit, plan_training

if TYPE_CHECKING:
    from rich.console import Console

_BIN_WIDTH_MZ = 1.0


def cross_validate(settings: DreamsSettings, console: Console) -> dict[str, Any]:
    """Fine-tune in folds that share no molecule, for several seeds, beside logistic regression."""
    settings = with_pre_trained_sizes(settings)
    spectra = read_inputs(settings, console)
    given = read_labels(settings, spectra)
    first = given.labels[:, 0].tolist() if given.labels.shape[1] else [0.0] * len(given.rows)
    rows = rows_of(spectra.ms_data, given.rows, settings.max_peaks_n)
    features = binned(rows, _BIN_WIDTH_MZ, settings.sizes.max_mz)
    lines: list[dict[str, Any]] = []
    planned, trained = None, None
    for seed in range(settings.seed, settings.seed + settings.seeds):
        own = replace(settings, seed=seed)
        splits = grouped_folds(first, given.molecules, settings.folds or 5, seed)
        for number, (train, test) in enumerate(splits, start=1):
            data = finetuning_data(own, spectra, given, train, [])
            build = finetuning_builder(own, given, train)
            if planned is None:
                planned = plan_training(own, at_its_largest(own, build), data)
                show_plan(planned, console)
                begin_folder(settings, {**spectra.to_json(), **planned.to_json()}, planned)
            torch.manual_seed(seed)
            module = build()
            begun = probing(own, spectra, given, train)(module)
            trained = fit(own, module, data, planned, folder=None)
            scores = _fold_scores(own, spectra, given, trained, test)
            scores |= _baseline_scores(given, features, train, test)
            scores = {name: plain_figure(value) for name, value in scores.items()}
            lines.append({"seed": seed, "fold": number, "num_test": len(test), **begun, **scores})
            console.print(str(lines[-1]), markup=False, soft_wrap=True, highlight=False)
    assert planned is not None
    assert trained is not None
    run_files(settings).write_json(FOLDS, lines)
    metrics = _over_folds(lines)
    return finish(settings, console, planned, trained, metrics=metrics, own={"folds": lines})


def _fold_scores(
    settings: DreamsSettings, spectra: Spectra, given: Labelled, trained: Trained, test: list[int]
) -> dict[str, float]:
    """Score a fold that was held out."""
    module = trained.module.eval()
    rows = rows_of(spectra.ms_data, [given.rows[i] for i in test], settings.max_peaks_n)
    predicted = in_batches(module.predict, rows, settings.batch_size)
    truth = given.labels[test]
    if given.objective.kind == BINARY:
        scores, labels = predicted[:, 0].tolist(), truth[:, 0].tolist()
        right = [(score > 0.5) == bool(label) for score, label in zip(scores, labels, strict=True)]
        return {"auroc": auroc(labels, scores), "accuracy": float(np.mean(right))}
    if module.scale is not None:
        return {"mae": float((predicted - truth).abs().mean())}
    return {"cosine": float(torch.cosine_similarity(predicted, truth, dim=-1).mean())}


def _baseline_scores(
    given: Labelled, features: np.ndarray, train: list[int], test: list[int]
) -> dict[str, float]:
    if given.objective.kind != BINARY:
        return {}
    labels = given.labels[:, 0].numpy()
    scores = logistic_scores(features, labels, train, test)
    majority = float(labels[train].mean() > 0.5)
    return {
        "logistic_auroc": auroc(labels[test].tolist(), scores.tolist()),
        "logistic_accuracy": float(((scores > 0.5) == labels[test]).mean()),
        "majority_accuracy": float((labels[test] == majority).mean()),
    }


def _over_folds(folds: list[dict[str, Any]]) -> dict[str, float]:
    """Return mean and standard deviation over all folds of all seeds."""
    names = [name for name in folds[0] if name not in {"seed", "fold", "num_test", "probe"}]
    out: dict[str, float] = {}
    for name in names:
        values = np.array([fold[name] for fold in folds], dtype=float)
        out[f"{name}_mean"] = float(np.nanmean(values))
        out[f"{name}_std"] = float(np.nanstd(values))
    return out
