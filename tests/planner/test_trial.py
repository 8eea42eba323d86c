"""A trial on a real batch, for what could not be followed."""

from __future__ import annotations

import pytest
from tests.zoo.coupled_jobs import Encoder, job_of

from memfit.analysis.separability import not_known
from memfit.planner.trial import BatchTrial
from memfit.prediction.recording import record
from memfit.separation import separation
from memfit.session.batches import find_layout
from memfit.strategies import CachedGradients

pytestmark = pytest.mark.slow


def test_a_trial_takes_what_is_known_of_the_job_with_it(monkeypatch):
    looked = []
    find = separation.find_representations

    def counted(*args):
        looked.append(args)
        return find(*args)

    monkeypatch.setattr(separation, "find_representations", counted)
    job = job_of(Encoder)
    layout = find_layout(job)
    trial = BatchTrial(job, layout, record(job, None, layout))
    told = trial(CachedGradients(micro_batch_size=5), not_known("A function is written in C."))
    assert told.trial.startswith("on one batch its gradients are those of")
    assert len(looked) <= 1
