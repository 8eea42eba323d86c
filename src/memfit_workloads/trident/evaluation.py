"""What a trained model is worth: metrics of both outcomes, and of each branch alone.

Shape suffixes: N clips.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memfit.errors import MissingExtraError

from .clips import Clips, collate
from .fusion import MODALITIES

NUM_BINS = 15
_MOST_ITERATIONS = 2000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answers:
    """What a model said of many clips, and what was true."""

    event: Tensor
    """(N,) probabilities."""
    severe: Tensor
    """(N,) probabilities, never above those of an event."""
    severe_alone: Tensor
    """(N,) probabilities of the second head by itself."""
    true_event: Tensor
    true_severe: Tensor
    embeddings: dict[str, Tensor]
    """(N, E) of each modality."""


def answers_for(
    model: nn.Module,
    clips: Clips,
    batch_size: int,
    read: Callable[[Sequence[int]], dict[str, Tensor]] | None = None,
) -> Answers:
    """Let a model answer for all clips, without gradients, so many at a time.

    Args:
        model: whose answers.
        clips: about which.
        batch_size: how many at a time.
        read: puts a batch of them together; by default they are read whole.
    """
    read = read or partial(collate, clips)
    device = next(model.parameters()).device
    parts: list[dict[str, Tensor]] = []
    with torch.no_grad():
        for begin in range(0, len(clips), batch_size):
            rows = range(begin, min(begin + batch_size, len(clips)))
            batch = read(rows)
            answer = model({name: part.to(device) for name, part in batch.items()})
            named = {name: getattr(answer.outcomes, name).sigmoid() for name in ("event", "severe")}
            named["severe_alone"] = answer.outcomes.severe_alone.sigmoid()
            named |= {f"true_{name}": batch[name] for name in ("event", "severe")}
            named |= answer.embeddings
            parts.append({name: part.float().cpu() for name, part in named.items()})
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return Answers(embeddings={name: whole.pop(name) for name in MODALITIES}, **whole)


def outcome_metrics(answers: Answers) -> dict[str, float | None]:
    """Compute AUROC, F1, Brier score and calibration error of both outcomes.

    ``violations`` is the share of clips whose severe event is likelier than an event, which the
    model makes impossible; ``violations_alone`` is that of the second head by itself.
    """
    found: dict[str, float | None] = {}
    for name in ("event", "severe"):
        probability = getattr(answers, name)
        truth = getattr(answers, f"true_{name}")
        found |= {
            f"{name}_auroc": auroc(probability, truth),
            f"{name}_f1": float(
                _sklearn("metrics").f1_score(truth, probability >= 0.5, zero_division=0.0)
            ),
            f"{name}_brier": float((probability - truth).square().mean()),
            f"{name}_ece": calibration_error(probability, truth),
        }
    found["violations"] = float((answers.severe > answers.event).float().mean())
    found["violations_alone"] = float((answers.severe_alone > answers.event).float().mean())
    return found


def auroc(scores: Tensor, truth: Tensor) -> float | None:
    """Return the area under the receiver's curve; None where only one class is there."""
    if truth.unique().numel() < 2:
        return None
    return float(_sklearn("metrics").roc_auc_score(truth.numpy(), scores.numpy()))


def calibration_error(probability: Tensor, truth: Tensor) -> float:
    """Return the expected calibration error over 15 bins of equal width.

    In each bin the mean probability is held against the share of events; differences are weighted
    by the clips in the bin. Source: Naeini et al. 2015, "Obtaining Well Calibrated Probabilities
    Using Bayesian Binning".
    """
    return sum(
        share * abs(confidence - frequency)
        for confidence, frequency, share in calibration_bins(probability, truth)
    )


def calibration_bins(probability: Tensor, truth: Tensor) -> list[tuple[float, float, float]]:
    """List mean probability, share of events and share of clips of each bin that has clips."""
    bins = (probability * NUM_BINS).ceil().clamp(1, NUM_BINS)
    found = []
    for number in bins.unique():
        inside = bins == number
        found.append(
            (
                float(probability[inside].mean()),
                float(truth[inside].mean()),
                float(inside.float().mean()),
            )
        )
    return found


def branch_aurocs(train: Answers, test: Answers) -> dict[str, float | None]:
    """Return the AUROC of an event from each branch alone.

    A logistic regression is fitted to the branch's embeddings of the training clips, whose weights
    came from training all branches together, and asked about the test clips.
    """
    found: dict[str, float | None] = {}
    for name in MODALITIES:
        if train.true_event.unique().numel() < 2:
            found[name] = None
            continue
        mean, spread = train.embeddings[name].mean(dim=0), train.embeddings[name].std(dim=0)
        scaled = [(each.embeddings[name] - mean) / (spread + 1e-6) for each in (train, test)]
        model = _sklearn("linear_model").LogisticRegression(C=0.1, max_iter=_MOST_ITERATIONS)
        model.fit(scaled[0].numpy(), train.true_event.numpy())
        found[name] = auroc(torch.from_numpy(model.decision_function(scaled[1].numpy())),
                            test.true_event)  # fmt: skip
    return found


def _sklearn(module: str) -> Any:
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError:
        raise MissingExtraError("memfit train trident", "scikit-learn", "trident") from None
