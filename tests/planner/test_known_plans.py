"""What earlier calls have recorded and fits is where a search begins; it decides nothing slower."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.planner.test_search import BUDGETS, SEEDS, World, search_of

from memfit.planner.search.first_plan import FirstPlan
from memfit.planner.search.search import Search


def beginning_with(world: World, budget_bytes: int, known, on_better=None) -> Search:
    search = search_of(world, budget_bytes, on_better=on_better)
    search._known = known
    return search


@given(SEEDS, BUDGETS, st.randoms(use_true_random=False))
def test_a_plan_that_is_known_to_fit_makes_no_answer_slower(seed, budget, draw):
    world = World(seed)
    fitting = [each for each in world.every_combination() if world.fits(each, budget)]
    if not fitting:
        return
    known = draw.choice(fitting)
    without = search_of(world, budget).run()
    found = beginning_with(world, budget, known).run()
    assert found.prediction.fits
    assert found.prediction.step_seconds <= world.seconds(known) * (1 + 1e-9)
    if without is not None:
        assert found.prediction.step_seconds <= without.prediction.step_seconds * (1 + 1e-9)


def test_with_a_known_plan_none_is_guessed(monkeypatch):
    def no_guess(*_):
        raise AssertionError("a plan is known")

    world = World(seed=3)
    budget = 15_000
    known = search_of(world, budget).run().strategies
    monkeypatch.setattr(FirstPlan, "look_for_any", no_guess)
    told = []
    found = beginning_with(world, budget, known, told.append).run()
    assert found.prediction.fits
    assert told[0].strategies == tuple(each.label() for each in known)


def test_a_known_plan_that_does_not_fit_after_all_changes_nothing():
    world = World(seed=3)
    found = beginning_with(world, 15_000, ()).run()
    assert not world.fits((), 15_000)
    assert found.strategies == search_of(world, 15_000).run().strategies
