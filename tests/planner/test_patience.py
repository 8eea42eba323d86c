"""Planning ends when it is told to, with the best plan so far."""

from __future__ import annotations

import pytest
from tests.planner.test_search import World, ready, search_of

import memfit
from memfit.errors import UsageError
from memfit.planner.result.ladder import Ladder
from memfit.planner.search.patience import Patience

BUDGET_SHARE = 0.8


def told(world: World, **wanted):
    """Return a search that keeps what it tells of."""
    better: list = []
    budget_bytes = int(BUDGET_SHARE * world.estimated_bytes(()))
    search = search_of(world, budget_bytes, on_better=better.append, **wanted)
    return search, better


@pytest.mark.parametrize("seed", range(5))
def test_every_better_plan_is_told_of_until_the_one_that_is_chosen(seed):
    world = World(seed)
    search, better = told(world)
    chosen = search.run()
    seconds = [each.step_seconds for each in better]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == len(seconds) > 0
    assert better[-1].strategies == tuple(s.label() for s in chosen.strategies)
    assert all(each.peak_bytes <= BUDGET_SHARE * world.estimated_bytes(()) for each in better)
    assert [each.num_recorded for each in better] == sorted(each.num_recorded for each in better)


@pytest.mark.parametrize("seed", range(5))
def test_interrupted_after_a_plan_that_fits_the_search_gives_it(seed):
    class Interrupted(World):
        def prediction(self, strategies, budget_bytes: int, *, is_exact: bool = True):
            if better:
                raise KeyboardInterrupt
            return super().prediction(strategies, budget_bytes, is_exact=is_exact)

    world, better = Interrupted(seed), []
    budget_bytes = int(BUDGET_SHARE * world.estimated_bytes(()))
    search = search_of(world, budget_bytes, on_better=better.append)
    found = search.run()
    assert tuple(s.label() for s in found.strategies) == better[0].strategies
    assert found.prediction.fits
    assert search.patience.is_interrupted or len(search.recordings.tried) == len(world.short)
    if search.patience.is_interrupted:
        assert Ladder(search).below(found) == []  # nothing more is recorded


def test_interrupted_before_anything_fits_there_is_no_plan():
    class Interrupted(World):
        def prediction(self, strategies, budget_bytes: int, *, is_exact: bool = True):
            if self.num_recomputed(strategies):
                raise KeyboardInterrupt
            return super().prediction(strategies, budget_bytes, is_exact=is_exact)

    world = Interrupted(seed=1)
    with pytest.raises(KeyboardInterrupt):
        search_of(world, world.estimated_bytes(()) // 3, splits=()).run()


@pytest.mark.parametrize("seed", range(5))
def test_when_the_time_is_over_the_first_plan_that_fits_is_taken(seed):
    world = World(seed)
    search, better = told(world, patience=Patience(1e-9))
    found = search.run()
    assert found.prediction.fits
    _, whole, _ = ready(seed)
    assert len(search.recordings.tried) <= len(whole.recordings.tried)
    assert tuple(s.label() for s in found.strategies) == better[-1].strategies


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_bound_that_is_no_time_is_refused(seconds):
    with pytest.raises(UsageError, match="seconds must be a positive number"):
        Patience(seconds)


def test_processor_time_is_bounded_apart_from_what_a_clock_shows(monkeypatch):
    used = [0.0]
    monkeypatch.setattr("memfit.planner.search.patience._processor_seconds", lambda: used[0])
    patience = Patience(processor_seconds=5.0)
    assert not patience.is_over
    used[0] = 5.0
    assert patience.is_over
    with pytest.raises(UsageError, match="processor_seconds must be a positive number"):
        Patience(processor_seconds=0)


def test_a_part_of_the_seconds_counts_until_the_rest_is_given():
    patience = Patience(60.0, 1e-9)
    assert patience.is_over
    patience.give_rest()
    assert not patience.is_over


@pytest.mark.slow
def test_plans_are_measured_though_the_search_ran_out_of_its_part_of_the_time(
    monkeypatch, regression_job
):
    run = []

    def time_plans(job, plans, device, known, num_rounds=3, enough_seconds=0.0, all_fit=False):
        run.extend(plans)
        return [1.0] * len(plans)

    monkeypatch.setattr("memfit.planner.measured.time_plans", time_plans)
    monkeypatch.setattr("memfit.planner.planning._SHARE_OF_ESTIMATES", 1e-9)
    memfit.plan(regression_job, "cpu", measure=True, seconds=100)
    assert run


@pytest.mark.slow
def test_an_interrupt_while_plans_are_run_keeps_the_best_estimate(monkeypatch, regression_job):
    def time_plans(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.planner.measured.time_plans", time_plans)
    found = memfit.plan(regression_job, "cpu", measure=True)
    assert found.prediction is not None
    assert any("was interrupted" in note for note in found.notes)
