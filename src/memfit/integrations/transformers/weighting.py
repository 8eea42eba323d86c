"""Finds out how the losses of pieces make up that of their batch.

A Trainer hands the items of the window to models that take further arguments, and leaves it to them
what they do with it: a causal model returns a sum over its labels divided by that number, a
classifier a mean over the samples of the batch, whatever it was handed. Which of them a step has is
followed through its recording; where that is not possible, its losses on a real batch tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch

from memfit.analysis.separability import Outcome, Separability
from memfit.errors import MemfitError
from memfit.integrations.labels import find_labels
from memfit.integrations.transformers.batches import NUM_ITEMS, check_can_be_cut
from memfit.integrations.transformers.training_step import TrainingStep, Weighting
from memfit.job import Job, Total
from memfit.separation.batch_conditions import broken_condition
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout
from memfit.session.borrowing import left_alone
from memfit.session.deterministic_draws import DeterministicDraws, untouched_randomness
from memfit.strategies.plan import Plan

_RANKS = {Outcome.PROVED: 0, Outcome.NOT_KNOWN: 1, Outcome.REFUTED: 2}


def find_weighting(step: TrainingStep, job: Job, plan: Plan | None = None) -> None:
    """Set how a step's pieces count.

    Whether they keep the results is another matter, which is looked into by whoever cuts.

    Args:
        step: of the trainer.
        job: of the step.
        plan: whose pieces are looked at; None takes halves of a batch.
    """
    if job.batch_size < 2:
        return
    size = job.batch_size // 2
    if plan is not None and plan.splitting is not None:
        size = min(size, plan.splitting.micro_batch_size)
    step.proofs = {}
    found: dict[Weighting, int] = {}
    for each in _candidates(step, job):
        found[each], proof = _rank(step, job, each, size)
        if not found[each]:
            step.proofs = {size: proof}
            break
    best = min(found.values())
    likely = [each for each, rank in found.items() if rank == best]
    step.weighting = likely[0]
    if best == _RANKS[Outcome.NOT_KNOWN] and len(likely) > 1:
        with suppress(MemfitError, RuntimeError, TypeError, ValueError):  # then nothing is proved
            step.weighting = _nearest(step, job, likely)


def _rank(
    step: TrainingStep, job: Job, weighting: Weighting, num_samples: int
) -> tuple[int, Separability]:
    """Say how well pieces that count so are known to keep the results; 0 is best."""
    step.weighting = weighting
    layout = find_layout(job)
    found: Separability = Separation(job, layout).of(num_samples)
    broken = broken_condition(layout, step.reference, found.conditions)
    outcome = found.outcome if broken is None else Outcome.REFUTED
    return _RANKS[outcome], found


def _nearest(step: TrainingStep, job: Job, likely: list[Weighting]) -> Weighting:
    """Return the way in which the losses of two halves make up the batch's best.

    Raises:
        MemfitError: if the batch cannot be cut.
    """
    check_can_be_cut(step.reference)
    layout = find_layout(job)
    halves = [*layout.split(step.reference, -(-job.batch_size // 2))]
    distances: dict[Weighting, float] = {}
    for weighting in likely:
        step.weighting = weighting
        losses = []
        for batch in (step.reference, *(half for half, _ in halves)):
            with left_alone(job), untouched_randomness(), DeterministicDraws(), torch.no_grad():
                losses.append(job.loss(job.model(), batch))
        whole, *parts = losses
        shares = [count / job.batch_size for _, count in halves]
        together = sum(
            float(part.sum if isinstance(part, Total) else part * share)
            for part, share in zip(parts, shares, strict=True)
        )
        expected = float(whole.sum if isinstance(whole, Total) else whole)
        distances[weighting] = abs(together - expected)
    return min(likely, key=distances.__getitem__)


def _candidates(step: TrainingStep, job: Job) -> Iterator[Weighting]:
    """Yield how losses may add up, the likeliest first."""
    if NUM_ITEMS in step.reference:
        yield Weighting.SUM
    elif _find_labels(step, job):
        yield Weighting.LABELS
    yield Weighting.SAMPLES
    if NUM_ITEMS in step.reference and _find_labels(step, job):
        yield Weighting.LABELS


def _find_labels(step: TrainingStep, job: Job) -> bool:
    """Have pieces count by the labels that the loss does not ignore, where the batch has such."""
    step.weighting = Weighting.SAMPLES
    found = find_labels(step, job)
    step.count = found or step.count
    return found is not None
