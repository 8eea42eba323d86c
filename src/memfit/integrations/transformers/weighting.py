"""Finds out how the losses of pieces make up that of their batch.

A Trainer hands the items of the window to models that take further arguments, and leaves it to them
what they do with it: a causal model returns a sum over its labels divided by that number, a
classifier a mean over the samples of the batch, whatever it was handed. Which of them a step has is
followed through its recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from memfit.analysis.separability import Outcome, Separability
from memfit.errors import MemfitError
from memfit.integrations.labels import LabelsSeen
from memfit.integrations.transformers.batches import NUM_ITEMS
from memfit.integrations.transformers.training_step import TrainingStep, Weighting
from memfit.job import Job
from memfit.prediction.recording import record
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout

_RANKS = {Outcome.PROVED: 0, Outcome.NOT_KNOWN: 1, Outcome.REFUTED: 2}


def find_weighting(step: TrainingStep, job: Job) -> Separability | None:
    """Set how a step's pieces count, and return what is known of half batches then.

    Args:
        step: of the trainer.
        job: of the step.
    """
    if job.batch_size < 2:  # noqa: PLR2004 - one sample is not cut
        return None
    found = [(each, *_judged(step, job, each)) for each in _candidates(step, job)]
    best = min(found, key=lambda each: each[1])
    step.weighting = best[0]
    return best[2]


def _judged(step: TrainingStep, job: Job, weighting: Weighting) -> tuple[int, Separability]:
    step.weighting = weighting
    separability = Separation(job, find_layout(job)).of(job.batch_size // 2)
    return _RANKS[separability.outcome], separability


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
    """Find the labels that a loss is a mean over, where the batch has any that it ignores."""
    step.weighting, step.labels_seen = Weighting.SAMPLES, LabelsSeen()
    with suppress(MemfitError):  # whoever plans will say why it cannot be recorded
        record(job)
    found, step.labels_seen = step.labels_seen.labels, None
    if found is None or not found.are_ignored_in(step.reference):
        return False
    step.count = found
    return True
