"""Where recording takes long, the plan in reserve is begun with before its pieces are recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planner.test_search import (
    ATTENTION,
    BLOCKS,
    FUSED,
    SPLITS,
    SomeRefused,
    World,
    space_of,
)

from memfit.planner.result.ladder import Ladder
from memfit.planner.search.reserve import RESERVE_SHARE, reserve_in_pieces
from memfit.planner.search.search import Search
from memfit.strategies.cached_gradients import CachedGradients
from memfit.trace.events import Category

PIECES = SPLITS[3]
FEW_BYTES = 1_000


class Listening:
    """Records nothing ahead, and keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[list, bool]] = []

    def expect(self, combinations, *, is_sure: bool = True) -> None:
        self.heard.append(([*combinations], is_sure))

    def take(self, strategies) -> None:
        """Have it recorded when it is asked for."""


class Looking(SomeRefused):
    """Notes how much was recorded when pieces began to be looked into."""

    def __init__(self, world: World) -> None:
        super().__init__(set())
        self.world, self.began = world, []

    def look_ahead(self, likely=()) -> None:
        del likely
        self.began.append([*self.world.short])


@pytest.fixture
def world() -> World:
    """Make a world that fits in pieces of eight samples, with little that lasts."""
    made = World(seed=5, errors=False)
    made.fixed_bytes, made.by_category = FEW_BYTES, {Category.BUFFERS.value: FEW_BYTES}
    return made


def searched(world: World, *, is_long: bool = True, ahead: Listening | None = None) -> Search:
    budget_bytes = world.estimated_bytes((PIECES,))
    evaluator = world.evaluator(budget_bytes)
    evaluator.ahead = ahead
    space = replace(space_of(fixed=()), split_checks=Looking(world))
    search = Search(evaluator, space, is_long=is_long)
    best = search.run()
    assert best is not None
    assert best.strategies == (PIECES,)
    return search


def reserve_of(world: World):
    whole = world.evaluator(1).in_short(())
    return reserve_in_pieces(whole, PIECES)


def test_it_is_the_fastest_that_is_estimated_to_be_small_enough(world):
    found = reserve_of(world)
    most_bytes = RESERVE_SHARE * world.estimated_bytes((PIECES,))
    enough = [(b, PIECES) for b in BLOCKS if world.estimated_bytes((b, PIECES)) <= most_bytes]
    assert set(found) == set(enough[0])
    assert len(enough) < len(BLOCKS)


def test_it_is_recorded_beside_the_pieces_and_given(world):
    ahead = Listening()
    search = searched(world, ahead=ahead)
    found = reserve_of(world)
    place = ahead.heard.index(([found], False))
    assert ahead.heard[place - 1] == ([(PIECES,)], True)  # what else was guessed makes room
    assert found not in search.recordings.tried
    (rung,) = Ladder(search).below(search.best_so_far)
    assert rung.strategies == found
    assert ([found], True) in ahead.heard[place:]  # nothing drops it meanwhile


@pytest.mark.parametrize("is_long", [True, False])
def test_the_same_is_given_without_other_processes(world, is_long):
    alone = Ladder(search := searched(world, is_long=is_long)).below(search.best_so_far)
    beside = Ladder(s := searched(world, is_long=is_long, ahead=Listening())).below(s.best_so_far)
    assert [each.strategies for each in alone] == [each.strategies for each in beside] != []


def test_where_recording_is_quick_nothing_is_begun_with(world):
    ahead = Listening()
    searched(world, is_long=False, ahead=ahead)
    assert ([reserve_of(world)], False) not in ahead.heard


def test_what_turns_out_too_large_gives_way_to_what_is_small_enough(world, monkeypatch):
    search, wrong = searched(world), reserve_of(world)
    usual = World.estimated_bytes
    monkeypatch.setattr(
        World,
        "estimated_bytes",
        lambda self, s: usual(self, s) + 2_000 * (set(s) == set(wrong)),
    )
    best = search.best_so_far
    (rung,) = Ladder(search).below(best)
    assert wrong in search.recordings.tried
    assert rung.strategies != wrong
    assert rung.peak_bytes <= RESERVE_SHARE * best.peak_bytes


def test_there_is_none_where_recomputing_saves_too_little_or_pieces_are_of_a_loss(world):
    whole = world.evaluator(1).in_short(())
    little = [r for r in whole.refinements if r.peak_bytes > 0.8 * whole.peak_bytes]
    assert little
    assert reserve_in_pieces(replace(whole, refinements=little), PIECES) is None
    assert reserve_in_pieces(whole, CachedGradients(micro_batch_size=8)) is None


def test_where_the_pieces_do_not_fit_after_all_it_is_dropped(world):
    ahead = Listening()
    usual, more_bytes = world.peak_bytes, 500
    world.peak_bytes = lambda s: usual(s) + more_bytes * (set(s) == {PIECES})
    evaluator = world.evaluator(world.estimated_bytes((PIECES,)))
    evaluator.ahead = ahead
    space = replace(space_of(fixed=()), split_checks=Looking(world))
    Search(evaluator, space, is_long=True).run()
    place = ahead.heard.index(([reserve_of(world)], False))
    assert ([], True) in ahead.heard[place:]


def looked(world: World, budget_bytes: int) -> list[list]:
    evaluator = world.evaluator(budget_bytes)
    evaluator.ahead = Listening()
    checks = Looking(world)
    fixed = ((None, FUSED), (None, ATTENTION))
    Search(evaluator, replace(space_of(fixed=fixed), split_checks=checks)).run()
    return checks.began


def test_pieces_are_looked_into_as_soon_as_what_is_begun_with_does_not_fit(world):
    world.savings, world.factors = {}, {FUSED: 0.9, ATTENTION: 0.8}
    (recorded,) = looked(world, world.estimated_bytes((PIECES,)))
    assert recorded == [(), (ATTENTION, FUSED)]


def test_pieces_are_not_looked_into_where_what_is_begun_with_fits(world):
    world.savings, world.factors = {ATTENTION: 100}, {FUSED: 0.9, ATTENTION: 0.8}
    assert looked(world, world.estimated_bytes((FUSED, ATTENTION))) == []


def test_what_may_be_slower_is_recorded_beside_the_others_unless_that_takes_long(world):
    world.savings, world.factors = {}, {FUSED: 0.9, ATTENTION: 0.95}
    fixed = ((None, FUSED), (None, ATTENTION))
    for is_long in (False, True):
        ahead = Listening()
        evaluator = world.evaluator(world.estimated_bytes((PIECES,)))
        evaluator.ahead = ahead
        Search(evaluator, space_of(fixed=fixed), is_long=is_long).run()
        assert (([(FUSED,)], False) in ahead.heard) is not is_long
