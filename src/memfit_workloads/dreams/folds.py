"""Cross-validation by molecule, and the baselines beside it.

Shapes: S spectra.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memfit.errors import MissingExtraError, UsageError

from .batches import SpectrumRows


def grouped_folds(
    labels: Sequence[float], groups: Sequence[str], num_folds: int, random_seed: int
) -> list[tuple[list[int], list[int]]]:
    """Split spectra into folds that share no molecule and have similar shares of each label.

    Returns:
        Positions to train on and to test on, per fold.

    Raises:
        UsageError: if there are fewer molecules than folds.
    """
    if len(set(groups)) < num_folds:
        msg = f"{len(set(groups))} molecules cannot be split into {num_folds} folds; lower --folds."
        raise UsageError(msg)
    splitter = _sklearn("model_selection").StratifiedGroupKFold(
        num_folds, shuffle=True, random_state=random_seed
    )
    places = np.zeros(len(groups))
    strata = np.asarray(labels) > np.median(labels) if len(set(labels)) > 2 else np.asarray(labels)
    folds = splitter.split(places, strata.astype(int), list(groups))
    return [(train.tolist(), test.tolist()) for train, test in folds]


def auroc(labels: Sequence[float], scores: Sequence[float]) -> float:
    """Return the area under the ROC curve; NaN where only one label is there."""
    if len(set(labels)) < 2:
        return float("nan")
    return float(_sklearn("metrics").roc_auc_score(labels, scores))


def binned(spectra: SpectrumRows, bin_width_mz: float, max_mz: float) -> np.ndarray:
    """Return root intensities summed per bin of m/z, (S, bins): what the baseline sees."""
    out = np.zeros((len(spectra), round(max_mz / bin_width_mz)))
    for i, row in enumerate(out):
        tokens = spectra.tokens(i)[1:]
        places = np.minimum((tokens[:, 0] / bin_width_mz).astype(int), out.shape[1] - 1)
        np.add.at(row, places, np.sqrt(tokens[:, 1]))
    return out


def logistic_scores(
    features: np.ndarray, labels: np.ndarray, train: Sequence[int], test: Sequence[int]
) -> np.ndarray:
    """Return a logistic regression's probabilities for the test rows, (len(test),)."""
    linear_model = _sklearn("linear_model")
    train, test = list(train), list(test)
    model = linear_model.LogisticRegression(max_iter=2000)
    model.fit(features[train], labels[train])
    return model.predict_proba(features[test])[:, 1]


def logistic_head(
    features: np.ndarray, labels: np.ndarray, strength: float
) -> tuple[np.ndarray, float]:
    """Return the weights and the intercept of a logistic regression of inverse penalty C."""
    model = _sklearn("linear_model").LogisticRegression(C=strength, max_iter=5000)
    model.fit(features, labels)
    return model.coef_[0], float(model.intercept_[0])


def _sklearn(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError:
        raise MissingExtraError("Cross-validation", "scikit-learn", "dreams") from None
