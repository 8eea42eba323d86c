"""What the search does not record, to save effort, over the made-up jobs of `test_search`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from tests.planner.test_search import (
    BLOCKS,
    BUDGETS,
    CHUNKED,
    FIXED,
    FUSED,
    SEEDS,
    SPLITS,
    World,
    ready,
    search_of,
)

from memfit.planner.search.candidates import Evaluator
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.search import Search
from memfit.trace.events import Category

# --- What is not recorded ---


def test_sizes_between_those_that_tell_how_the_peak_grows_are_passed_over():
    world = World(seed=3, errors=False)
    smallest_bytes = min(map(world.peak_bytes, world.every_combination()))
    search = search_of(world, smallest_bytes + 1)
    chosen = search.run()
    sizes = Counter(tuple(s for s in each if s not in SPLITS) for each in world.short)
    assert SPLITS[-1] in chosen.strategies
    assert max(sizes.values()) <= 3  # the whole batch and two sizes


def test_pieces_larger_than_those_that_fit_as_they_are_are_not_recorded():
    world = World(seed=3, errors=False)
    world.recompute, world.savings = 0.3, {}
    world.factors = {FUSED: 0.9, CHUNKED: 1.5}
    world.by_category = {Category.PARAMETERS.value: world.fixed_bytes}
    for split in SPLITS:
        world.short.clear()
        chosen = search_of(world, world.peak_bytes((split,))).run()
        recorded = {member for members in world.short for member in members}
        assert chosen.strategies == (FUSED, split)
        assert not recorded.intersection(SPLITS[: SPLITS.index(split)])


def test_what_saves_next_to_nothing_is_not_combined_with_everything_else():
    world = World(seed=3, errors=False)
    world.savings[CHUNKED] = 20
    world.factors[FUSED] = 1.1
    search = search_of(world, 30_000)
    assert search.run().prediction.fits
    assert not any({CHUNKED, FUSED} <= set(members) for members in world.short)


def test_what_saves_next_to_nothing_is_taken_where_nothing_else_is_missing():
    world = World(seed=3, errors=False)
    world.savings = {FUSED: 0, CHUNKED: 40}
    smallest_bytes = min(map(world.peak_bytes, world.every_combination()))
    chosen = search_of(world, smallest_bytes).run()
    assert CHUNKED in chosen.strategies


# --- Bounded effort ---


def thrifty(world: World, budget_bytes: int, most_operators: int) -> Search:
    """Return a search in which every recording counts as one operator."""
    full = world.evaluator(budget_bytes)
    counted = Evaluator(
        lambda strategies: replace(full.in_short(strategies), num_operators=1),
        lambda strategies: replace(full.in_full(strategies), num_operators=1),
    )
    space = SearchSpace(options=FIXED, splits=SPLITS, must_split=False, refused=())
    return Search(counted, space, slack=0.05, most_operators=most_operators)


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_a_bounded_search_records_little_and_what_it_gives_fits(seed, budget):
    world = World(seed)
    search = thrifty(world, budget, most_operators=6)
    chosen = search.run()
    # Twice the bound in the queue, then the strongest two and what makes them smaller.
    assert len(search.recordings.tried) <= 2 * 6 + 2 + len(BLOCKS)
    if chosen is not None:
        assert chosen.prediction.fits
        assert world.fits(chosen.strategies, budget)


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_a_bounded_search_finds_a_plan_wherever_the_smallest_one_fits(seed, budget):
    world = World(seed, errors=False)
    smallest_bytes = min(world.peak_bytes(members) for members in world.every_combination())
    chosen = thrifty(world, budget, most_operators=6).run()
    assert (chosen is not None) == (smallest_bytes <= budget)


@pytest.mark.slow
@given(SEEDS, BUDGETS)
def test_what_a_bounded_search_left_out_is_no_faster_than_it_says(seed, budget):
    world = World(seed)
    search = thrifty(world, budget, most_operators=6)
    chosen = search.run()
    if chosen is None:
        return
    fastest = world.fastest_seconds(budget)
    known = [
        chosen.prediction.step_seconds / 1.05,
        *(r.seconds for _, r in search.tree.refinements()),
    ]
    left = search.least_seconds_left
    assert fastest >= min(known if left is None else [*known, left]) * (1 - 1e-9)


def test_an_unbounded_search_leaves_nothing_out():
    _, search, _ = ready()
    assert search.least_seconds_left is None


def test_what_is_known_to_be_slow_is_not_recorded_before_what_may_be_faster():
    world = World(seed=3, errors=False)
    budget_bytes = int(0.8 * world.estimated_bytes(()))
    slow = dict.fromkeys(SPLITS, 10.0)
    space = SearchSpace(options=FIXED, splits=SPLITS, must_split=False, refused=(), slowdowns=slow)
    found = Search(world.evaluator(budget_bytes), space).run()
    assert found.prediction.fits
    assert not any(world.is_split(strategies) for strategies in world.short)
