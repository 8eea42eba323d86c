"""Begins fine-tuning with a linear probe: the head of a logistic regression on the embeddings.

How strongly its weights are kept small is chosen on folds inside the training part, by molecule;
what is held out has no say. Source: Kumar et al. 2022, arXiv 2202.10054: a head that fits before
the backbone learns keeps what pre-training gave.

Shapes: S spectra, D the width of an embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memfit.errors import UsageError

from .batches import SpectrumRows
from .data_module import in_batches
from .folds import grouped_folds, logistic_head
from .objectives import BINARY

_BATCH_SIZE = 32
_NUM_INNER_FOLDS = 5
_LEAST_PROBABILITY = 1e-6


def begin_at_probe(
    module: Any,
    spectra: SpectrumRows,
    labels: Tensor,
    molecules: Sequence[str],
    strengths: Sequence[float],
) -> float:
    """Set the head to what a logistic regression on standardised embeddings finds.

    Args:
        module: its backbone stays as it is; its head is one linear layer for one yes or no.
        spectra: that are trained on.
        labels: of them, (S, 1).
        molecules: of them; spectra of one are on one side of the inner folds.
        strengths: C of the regression; of several, that of the lowest loss over inner folds.

    Returns:
        The strength that was taken.

    Raises:
        UsageError: if the objective is no single yes or no, the head has several layers, or all
            labels are alike.
    """
    num_layers = sum(isinstance(each, nn.Linear) for each in module.head)
    if module.objective.kind != BINARY or labels.shape[1] != 1 or num_layers != 1:
        msg = (
            f"--probe fits one linear layer to one yes or no, not {module.objective.name} with "
            f"{labels.shape[1]} outputs and {num_layers} layers. Leave it out, or take has_F and "
            "--head_depth 1."
        )
        raise UsageError(msg)
    column = labels[:, 0].double().numpy()
    if len(set(column.tolist())) < 2:
        msg = f"--probe needs spectra of both labels; all {len(column)} are labelled alike."
        raise UsageError(msg)
    was_training = module.training
    features_SD = in_batches(module.eval().backbone.embed, spectra, _BATCH_SIZE).double().numpy()
    module.train(was_training)
    strength = strengths[0]
    if len(strengths) > 1:
        losses = [inner_loss(features_SD, column, molecules, each) for each in strengths]
        strength = strengths[int(np.argmin(losses))]
    _set_head(module.head[0], *fitted(features_SD, column, strength))
    return strength


def fitted(
    features_SD: np.ndarray, column: np.ndarray, strength: float
) -> tuple[np.ndarray, float]:
    """Return weights and intercept of a regression on standardised features, for plain ones."""
    means, widths = features_SD.mean(0), features_SD.std(0)
    widths = np.where(widths > 0, widths, 1.0)
    weights, intercept = logistic_head((features_SD - means) / widths, column, strength)
    weights = weights / widths
    return weights, float(intercept - weights @ means)


def inner_loss(
    features_SD: np.ndarray, column: np.ndarray, molecules: Sequence[str], strength: float
) -> float:
    """Return the mean cross-entropy over folds that share no molecule; infinite without any."""
    num_folds = min(_NUM_INNER_FOLDS, len(set(molecules)))
    losses: list[float] = []
    folds = grouped_folds(column.tolist(), molecules, num_folds, 0) if num_folds > 1 else []
    for train, test in folds:
        if len(set(column[train].tolist())) < 2:
            continue
        weights, intercept = fitted(features_SD[train], column[train], strength)
        logits = features_SD[test] @ weights + intercept
        of_truth = 1 / (1 + np.exp(-np.where(column[test] > 0, logits, -logits)))
        losses += (-np.log(of_truth.clip(_LEAST_PROBABILITY))).tolist()
    return float(np.mean(losses)) if losses else float("inf")


def _set_head(head: nn.Linear, weights: np.ndarray, intercept: float) -> None:
    with torch.no_grad():
        head.weight[0] = torch.from_numpy(weights).to(head.weight)
        head.bias.fill_(intercept)
