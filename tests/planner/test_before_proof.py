"""Pieces that are recorded while a copy of this process still looks into them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.zoo import planned_jobs as planner_jobs
from tests.zoo.opaque_jobs import labelled_job, opaque_job
from torch import nn

import memfit
from memfit.errors import StrategyError
from memfit.planner.search.candidates import Candidate
from memfit.planner.search.evaluation import JobEvaluator
from memfit.planner.search.splits import SplitChecks
from memfit.strategies.micro_batching import MicroBatching

HALVED = MicroBatching(micro_batch_size=4)


class Remembering(nn.Module):
    """Keeps what it saw last, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.last = torch.zeros(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.last = inputs.detach().mean(1)
        return self.inner(inputs)


def remembering_job() -> memfit.Job:
    return memfit.Job(
        model=Remembering,
        batch=lambda size: torch.randn(size, 16),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )


def evaluator_of(job: memfit.Job) -> JobEvaluator:
    evaluator = planner_jobs.evaluator_of(job)
    checks = SplitChecks([HALVED], evaluator.plain.facts)
    evaluator.space = replace(evaluator.space, splits=(HALVED,), split_checks=checks)
    return evaluator


def said(candidate: Candidate) -> object:
    prediction = replace(candidate.prediction, record_seconds=0.0, timeline=None)
    return replace(candidate, prediction=prediction, chain=None, known={}), [
        (each.peak_bytes, each.seconds) for each in candidate.refinements
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", [labelled_job(ignored=0), opaque_job(torch.sin, batch_size=8, width=16)]
)
def test_what_is_recorded_before_it_is_proved_is_what_is_recorded_after(job, recorded):
    evaluator = evaluator_of(job)
    evaluator.record_before_proof((HALVED,))
    assert evaluator.space.split_checks.refused() == ()
    early = evaluator.in_short((HALVED,))
    assert len(recorded) == 1
    assert said(early) == said(evaluator_of(job).in_short((HALVED,)))
    assert early.prediction.numerics == "exact"


def test_pieces_that_turn_out_to_mix_samples_are_refused_all_the_same():
    evaluator = evaluator_of(opaque_job(lambda x: x - x.mean(0), batch_size=8, width=16))
    evaluator.record_before_proof((HALVED,))
    for _ in range(2):
        with pytest.raises(StrategyError, match="cached-gradients"):
            evaluator.in_short((HALVED,))


@pytest.mark.slow
def test_pieces_that_leave_something_else_behind_are_recorded_again(recorded):
    evaluator = evaluator_of(remembering_job())
    evaluator.record_before_proof((HALVED,))
    assert len(recorded) == 1
    candidate = evaluator.in_short((HALVED,))
    assert len(recorded) == 2
    assert said(candidate) == said(evaluator_of(remembering_job()).in_short((HALVED,)))
    separation = evaluator.plain.facts.separation
    assert HALVED.separability(separation).overwritten == ("model.last",)


def test_what_was_assumed_is_forgotten():
    evaluator = evaluator_of(opaque_job(lambda x: x - x.mean(0), batch_size=8, width=16))
    separation = evaluator.plain.facts.separation
    with separation.assuming(4):
        assert separation.of(4).is_proved
        assert not separation.of(2).is_proved
    assert separation.of(4).is_refuted
