"""Pieces of a batch that are guessed to fit, so that a large step has some plan soon."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.test_search import (
    ATTENTION,
    BLOCKS,
    CHUNKED,
    FIXED,
    FUSED,
    SPLITS,
    World,
    search_of,
    space_of,
)

from memfit.planner.search import first_plan as planning_first
from memfit.planner.search.candidates import Candidate
from memfit.planner.search.first_guess import piece_guesses, quick_start
from memfit.planner.search.neighbours import Neighbours
from memfit.planner.search.options import SearchSpace
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.cached_gradients import CachedGradients
from memfit.strategies.fused_attention import FusedAttention
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_in_backward import OptimizerInBackward
from memfit.trace.events import Category

LASTING_BYTES = 9_000


class Refusing:
    """Refuses pieces of some sizes."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def obstacle(self, split: MicroBatching) -> str | None:
        return "no" if split.micro_batch_size in self.sizes else None


@pytest.fixture
def world() -> World:
    """Make a world in which half of what lasts are parameters, and nothing is kept for each."""
    made = World(seed=5, errors=False)
    half = LASTING_BYTES // 2
    made.by_category = dict.fromkeys([Category.PARAMETERS.value, Category.BUFFERS.value], half)
    return made


def guesses(
    world: World, budget_bytes: int, space: SearchSpace, *alone: tuple
) -> list[tuple[object, ...]]:
    evaluator = world.evaluator(budget_bytes)
    root, *others = (evaluator.in_short(strategies) for strategies in ((), *alone))
    return [guess.strategies for guess in piece_guesses(root, [root, *others], space)]


def most_bytes(whole: Candidate, size: int) -> int:
    """Compute what pieces of a size are guessed to take: gradients as large as parameters."""
    kept_bytes = LASTING_BYTES + LASTING_BYTES // 2
    return kept_bytes + -(-(whole.floor_bytes - kept_bytes) * size // 64)


def test_the_largest_pieces_that_are_likely_to_fit_are_taken(world):
    whole = world.evaluator(1).in_short(())
    for place, split in enumerate(SPLITS):
        budget_bytes = most_bytes(whole, split.micro_batch_size)
        fitting = [(each,) for each in SPLITS[place : place + 3]]
        assert guesses(world, budget_bytes, space_of()) == fitting[:2]
        assert guesses(world, budget_bytes - 1, space_of()) == fitting[1:]
        assert fitting[0] == (split,)


def test_other_strategies_are_combined_with_them_the_fastest_first(world):
    budget_bytes = most_bytes(world.evaluator(1).in_short(()), 1)
    found = guesses(world, budget_bytes, space_of(), (FUSED,), (CHUNKED,))
    kinds = [*dict.fromkeys(tuple(member for member in each[:-1]) for each in found)]
    assert kinds == sorted([(), (FUSED,), (CHUNKED,)], key=world.seconds)


def test_pieces_that_may_not_be_taken_are_passed_over(world):
    budget_bytes = most_bytes(world.evaluator(1).in_short(()), 32)
    refusing = replace(space_of(), split_checks=Refusing(32, 16))
    assert guesses(world, budget_bytes, refusing) == [(SPLITS[2],), (SPLITS[3],)]
    whole_batch = replace(space_of(), splits=(CachedGradients(micro_batch_size=8),))
    assert guesses(world, budget_bytes, whole_batch) == [(CachedGradients(micro_batch_size=8),)]


def test_nothing_is_guessed_where_nothing_is_known(world):
    world.by_category = {}
    assert guesses(world, 10**9, space_of()) == []


def test_a_step_that_is_far_too_large_has_a_plan_after_few_recordings(world, monkeypatch):
    numbers = []

    def first_plan(found) -> None:
        numbers.append(found.num_recorded)

    budget_bytes = most_bytes(world.evaluator(1).in_short(()), 2)
    with_guess = search_of(world, budget_bytes, on_better=first_plan).run()
    num_guessed = numbers[0]
    numbers.clear()
    monkeypatch.setattr(planning_first, "piece_guesses", lambda *_: [])
    without = search_of(world, budget_bytes, on_better=first_plan).run()
    assert num_guessed < numbers[0]
    assert with_guess.strategies == without.strategies
    assert len(FIXED) < num_guessed <= len(FIXED) + 5


def test_where_pieces_do_not_help_all_that_saves_most_is_tried_at_once(world, monkeypatch):
    slower = (CHUNKED, OptimizerInBackward(), ActivationOffload(), FusedAttention())
    world.savings = dict.fromkeys(slower, 900)
    world.factors = {each: 1.05 + 0.01 * place for place, each in enumerate(slower)}
    fixed = tuple((None, each) for each in slower)
    budget_bytes = int(world.estimated_bytes((*slower, BLOCKS[-1])) / 0.94)
    numbers = []

    def first_plan(found) -> None:
        numbers.append(found.num_recorded)

    for _ in range(2):
        search = search_of(world, budget_bytes, fixed=fixed, splits=(), on_better=first_plan)
        assert set(slower) <= set(search.run().strategies)
        monkeypatch.setattr(Neighbours, "strongest", lambda _: iter(()))
    assert numbers[0] < numbers[1]


def test_what_costs_little_is_tried_before_what_saves_most(world, monkeypatch):
    """Its smallest peak is estimated to fit just so."""
    cheap, dear = OptimizerInBackward(), (ActivationOffload(),)
    assert cheap.costs_little
    assert not any(each.costs_little for each in dear)
    world.savings = {cheap: 900, **dict.fromkeys(dear, 900)}
    world.factors = {cheap: 1.01, **dict.fromkeys(dear, 1.8)}
    fixed = tuple((None, each) for each in (cheap, *dear))
    budget_bytes = world.estimated_bytes((cheap, BLOCKS[-1]))
    found = []
    search = search_of(world, budget_bytes, fixed=fixed, splits=(), on_better=found.append)
    best = search.run()
    assert cheap.label() in found[0].strategies
    assert not any(each.label() in found[0].strategies for each in dear)
    assert found[0].num_recorded < 7
    assert best.prediction.step_seconds <= found[0].step_seconds
    monkeypatch.setattr(Neighbours, "mildest", lambda *_: iter(()))
    found.clear()
    search_of(world, budget_bytes, fixed=fixed, splits=(), on_better=found.append).run()
    assert any(each.label() in found[0].strategies for each in dear)


class Underestimated(World):
    """Everything with recomputed blocks takes a fifteenth more than was estimated."""

    def peak_bytes(self, strategies) -> int:
        share = 16 / 15 if self.num_recomputed(strategies) else 1.0
        return int(self.estimated_bytes(strategies) * share)


def test_a_first_plan_that_misses_shows_what_the_next_is_chosen_by():
    world = Underestimated(errors=False)
    world.factors[ATTENTION] = 0.8
    world.fixed_bytes, world.savings[ATTENTION] = 60_000, 50_000
    budget_bytes = int(world.estimated_bytes((ATTENTION, BLOCKS[3])) / 0.945)
    search_of(world, budget_bytes, splits=(), fixed=((None, ATTENTION),)).run()
    places = [n for n, each in enumerate(world.short) if world.num_recomputed(each)]
    assert not world.fits(world.short[places[0]], budget_bytes)
    assert world.fits(world.short[places[1]], budget_bytes)
    assert places[1] == places[0] + 1, "it was recorded later than it could have been"


def test_what_fits_by_the_first_recording_is_the_second():
    world = World(seed=3, errors=False)
    world.savings[FUSED], world.factors[FUSED] = 0, 0.9
    world.factors[ATTENTION], world.savings[ATTENTION] = 1.1, 0
    fixed = ((None, FUSED), (None, ATTENTION))
    budget_bytes = int(world.estimated_bytes((FUSED, BLOCKS[3])) / 0.945)
    found = []
    search_of(world, budget_bytes, splits=(), fixed=fixed, on_better=found.append).run()
    assert found[0].num_recorded == 3  # as it is, what is begun with, and this
    assert found[0].strategies == (FUSED.label(), BLOCKS[3].label())


def test_what_may_not_fit_is_not_a_quick_start():
    world = World(seed=3, errors=False)
    root = world.evaluator(1).in_short(())
    smallest_bytes = root.refinements[-1].peak_bytes
    assert quick_start(root, (FUSED,), smallest_bytes - 1, space_of()) is None
    assert quick_start(root, (FUSED, ATTENTION), smallest_bytes, space_of()) == (FUSED, BLOCKS[-1])
