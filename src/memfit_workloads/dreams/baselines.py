"""What pre-training is held against: figures reached without reading a spectrum's peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .batches import SpectrumRows, mz_classes
from .folds import logistic_scores
from .sizes import DreamsSizes


def frequency_top1(
    train: SpectrumRows, batches: Sequence[Mapping[str, Tensor]], sizes: DreamsSizes
) -> float:
    """Return how often the most frequent class of the training peaks is a masked peak's class."""
    mzs = np.concatenate([train.tokens(i)[1:, 0] for i in range(len(train))])
    likeliest = int(np.bincount(mz_classes(mzs, sizes.mz_bin, sizes.max_mz).numpy()).argmax())
    targets = torch.cat([batch["targets"][batch["weights"] > 0] for batch in batches])
    return float((targets == likeliest).float().mean())


def order_by_precursor(data: Any) -> float:
    """Return how often a logistic regression on both precursors' m/z and charge orders a pair."""
    train = [data.train_set[i] for i in range(len(data.train_set))]
    val = [data.val_set[i] for i in range(len(data.val_set))]
    rows = [_pair_features(data.train_set, i) for i in range(len(train))]
    rows += [_pair_features(data.val_set, i) for i in range(len(val))]
    labels = np.array([float(each["earlier"]) for each in [*train, *val]])
    if len(set(labels[: len(train)].tolist())) < 2:
        return float("nan")
    first, last = range(len(train)), range(len(train), len(labels))
    scores = logistic_scores(np.stack(rows), labels, first, last)
    return float(((scores > 0.5) == labels[len(train) :]).mean())


def _pair_features(dataset: Any, index: int) -> np.ndarray:
    """Return the precursors' m/z (in units of 100) and charges of a pair, (4,)."""
    rows = dataset.pair(index)
    ms_data = dataset.spectra.ms_data
    places = [dataset.spectra.rows[row] for row in rows]
    mzs = [float(ms_data.column("precursor_mz")[place]) / 100 for place in places]
    charges = [float(ms_data.column("charge")[place]) for place in places]
    return np.array([*mzs, *charges])
