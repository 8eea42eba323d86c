"""Of everything that a report shows, the plan that is given is the fastest that fits."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.planner.test_search import (
    BATCH_SIZE,
    BLOCKS,
    BUDGETS,
    SEEDS,
    SPLITS,
    Lengthened,
    space_of,
)
from tests.zoo import planned_jobs
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Job
from memfit.devices.catalogue import load_device
from memfit.errors import NoPlanFitsError
from memfit.planner.cache.recording_cache import RecordingCache
from memfit.planner.result.assembly import FinishedSearch
from memfit.planner.search.search import Search


class Cached(Lengthened):
    """Pieces of some size are faster than larger ones, as what fits into a cache is."""

    def __init__(self, seed: int, fast_size: int) -> None:
        super().__init__(seed, is_short=True)
        self.fast_size = fast_size

    def seconds(self, strategies) -> float:
        size = next((s.micro_batch_size for s in strategies if s in SPLITS), BATCH_SIZE)
        return super().seconds(strategies) * (0.6 if size == self.fast_size else 1.0)


def finished(search: Search) -> FinishedSearch:
    """Return a search whose job is made up, and which has been run."""
    return FinishedSearch(
        device=load_device("cpu"), plain=None, evaluate=None, search=search, is_measured=False
    )


@pytest.mark.slow
@example(seed=6766, budget=6763, fast_size=32, is_quick=False)  # the smallest is not what fits
@given(SEEDS, BUDGETS, st.sampled_from([s.micro_batch_size for s in SPLITS]), st.booleans())
def test_nothing_that_was_recorded_and_fits_is_faster(seed, budget, fast_size, is_quick):
    search = Search(Cached(seed, fast_size).evaluator(budget), space_of(), slack=0.02 * is_quick)
    best = search.run()
    if best is None:
        assert not any(each.prediction.fits for each in search.recordings.tried.values())
        return
    best, rungs = finished(search).with_rungs(best)
    fitting = [each for each in search.recordings.tried.values() if each.prediction.fits]
    assert best.is_exact
    assert best.cost == min(each.cost for each in fitting)
    assert [each.peak_bytes for each in (best, *rungs)] == sorted(
        {each.peak_bytes for each in (best, *rungs)}, reverse=True
    )


def test_a_plan_in_reserve_that_is_faster_is_chosen_instead():
    world = Cached(3, fast_size=32)
    world.broken = set(BLOCKS)
    search = Search(world.evaluator(10**6), space_of(), slack=0.02)
    first = search.run()
    best, _ = finished(search).with_rungs(first)
    assert first.strategies != best.strategies
    assert SPLITS[0] in best.strategies


# --- Real jobs: what is shown, and what earlier calls have recorded ---


def wide() -> Job:
    """Return a job whose smaller pieces are estimated to be as fast, as they fit into a cache."""
    return mean_square_job(
        lambda: nn.Sequential(nn.Linear(96, 1024), nn.ReLU(), nn.Linear(1024, 8)), 96,
        batch_size=2048,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )  # fmt: skip


JOBS = {
    "wide": wide,
    "blocks": lambda: mean_square_job(
        lambda: nn.Sequential(*(planned_jobs.MLP(64) for _ in range(4))), 64, batch_size=512
    ),
    "transformer": lambda: planned_jobs.transformer(num_blocks=2),
}
SHARES = (1.2, 0.5)


def planned(job: Job, budget_bytes: int, folder: pathlib.Path) -> memfit.PlanningResult | None:
    cache = RecordingCache(folder, "a job of this test", load_device("cpu"))
    with cache.used():
        try:
            return memfit.plan(job, budget=budget_bytes, cache=cache)
        except NoPlanFitsError:
            return None


def at_any_time(plan: memfit.PlanningResult | None) -> object:
    """Return all that a plan says, but how long recording took and the order of small frees."""
    return plan and replace(
        plan,
        prediction=None,
        notes=(),  # they say how long recording took
        ladder=[(rung.strategies, rung.prediction.peak_allocated_bytes) for rung in plan.ladder],
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_what_was_asked_before_changes_no_answer_and_none_is_beaten_by_what_it_shows(
    name, tmp_path
):
    job = JOBS[name]()
    plain_bytes = memfit.predict(job).peak_allocated_bytes
    for share in SHARES:
        budget_bytes = int(share * plain_bytes)
        alone = planned(job, budget_bytes, tmp_path / f"alone-{share}")
        after_others = planned(job, budget_bytes, tmp_path / "shared")
        assert at_any_time(alone) == at_any_time(after_others)
        if alone is not None:
            fitting = [each.step_seconds for each in alone.considered if each.fits]
            assert alone.prediction.step_seconds == min(fitting)
