"""A recording that would take too long, or too much memory, is given up; so is a search in time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.zoo import planned_jobs
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit.errors import NoPlanFitsError
from memfit.planner import one_placement
from memfit.planner.search import recording_limits
from memfit.planner.search.evaluation import JobEvaluator
from memfit.planner.search.patience import Patience
from memfit.planner.search.recording_limits import TooLongError
from memfit.strategies.micro_batching import MicroBatching

NUM_ROUNDS = 4


class Rounds(nn.Module):
    """A layer of many operators in training, which catches whatever its own code raises."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            for _ in range(NUM_ROUNDS):
                x = torch.tanh(self.layers(x))
        except Exception:  # noqa: BLE001 - as code does that goes on whatever happens
            return x
        return x


@pytest.fixture
def job() -> memfit.Job:
    return mean_square_job(Rounds, 32, batch_size=64)


@pytest.mark.slow
def test_what_is_much_longer_than_the_effort_allows_is_given_up_unless_all_is_wanted(
    job, monkeypatch
):
    budget_bytes = int(0.7 * memfit.predict(job).peak_allocated_bytes)
    monkeypatch.setattr(one_placement, "_MOST_OPERATORS", 1)
    monkeypatch.setattr(one_placement, "_LONGEST", 1.5)
    words = (
        r"micro-batching\(32\): recording it takes more than [\d,]+ operators; --thorough does so"
    )
    with pytest.raises(NoPlanFitsError, match=words):
        memfit.plan(job, budget=budget_bytes)
    assert memfit.plan(job, budget=budget_bytes, thorough=True).prediction.fits


def test_once_a_plan_is_known_a_recording_does_not_outlast_the_time(job, monkeypatch):
    plain_bytes = memfit.predict(job).peak_allocated_bytes
    monkeypatch.setattr(recording_limits, "_OPERATORS_BETWEEN_LOOKS", 16)
    looks = []
    over = Patience.is_over_for_good

    def look(self: Patience) -> bool:
        if self.has_plan:
            looks.append(1)
            self.interrupt()
        return over.fget(self)

    monkeypatch.setattr(Patience, "is_over_for_good", property(look))
    found = memfit.plan(job, budget=2 * plain_bytes)
    assert looks
    assert found.ended_early
    assert found.prediction.fits


@pytest.mark.slow
def test_where_all_pieces_are_too_many_a_few_stand_for_them(job, monkeypatch):
    def too_long(self: JobEvaluator, strategies: object) -> None:
        raise TooLongError("micro-batching(1)", "it has too many operators.")

    monkeypatch.setattr(JobEvaluator, "_whole", too_long)
    monkeypatch.setattr(JobEvaluator, "_repeated", lambda *_: None)  # pieces are not alike
    evaluator = planned_jobs.evaluator_of(job)
    pieces = (MicroBatching(micro_batch_size=1),)
    few = evaluator.in_short(pieces)
    assert not few.is_exact
    assert evaluator.in_full(pieces) == replace(few, is_exact=True)
