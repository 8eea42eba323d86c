"""How far off estimates are is learnt for each way to recompute blocks by itself."""

from __future__ import annotations

from tests.planner.test_search import BLOCKS, FUSED, World, search_of

from memfit.planner.search.candidates import Candidate, Refinement
from memfit.planner.search.tree import SearchNode
from memfit.strategies.activation_offload import ActivationOffload

OFFLOAD = ActivationOffload(blocks=("layers.0",))


def refinement(*strategies, peak_bytes: int = 1000) -> Refinement:
    return Refinement(strategies=strategies, peak_bytes=peak_bytes, seconds=1.0)


def recorded(peak_bytes: int, *strategies) -> Candidate:
    world = World(errors=False)
    world.peak_bytes = lambda _: peak_bytes
    return world.evaluator(10**6).in_short(strategies)


def test_what_moves_inputs_shows_nothing_of_what_does_not():
    node = SearchNode((FUSED,), 0, None)
    moving = refinement(FUSED, BLOCKS[0], OFFLOAD)
    node.learn(moving, recorded(1700, *moving.strategies))
    assert node.expected_bytes(refinement(FUSED, BLOCKS[3], OFFLOAD)) == 1700
    staying = refinement(FUSED, BLOCKS[3])
    assert node.correction_bytes(staying) is None
    assert node.expected_bytes(staying) == 1000
    node.learn(staying, recorded(990, *staying.strategies))
    assert node.expected_bytes(refinement(FUSED, BLOCKS[1])) == 990
    assert node.expected_bytes(moving) == 1700


def test_of_a_node_that_moves_all_its_inputs_refinements_are_of_one_kind():
    node = SearchNode((ActivationOffload(),), 0, None)
    kinds = {node.kind_of(refinement(ActivationOffload(), each)) for each in BLOCKS}
    assert len(kinds) == 1


class MovingIsLarger(World):
    """Blocks whose inputs are moved away take half as much again as was estimated."""

    def evaluator(self, budget_bytes: int):
        evaluator = super().evaluator(budget_bytes)
        in_short = evaluator.in_short

        def with_moving(strategies) -> Candidate:
            found = in_short(strategies)
            if not found.refinements:
                return found
            moving = [
                Refinement(
                    strategies=(*each.strategies, OFFLOAD),
                    peak_bytes=each.peak_bytes - 2000,
                    seconds=each.seconds * 1.2,
                )
                for each in found.refinements
            ]
            both = sorted((*found.refinements, *moving), key=lambda each: each.seconds)
            return Candidate(
                strategies=strategies, prediction=found.prediction, refinements=tuple(both)
            )

        evaluator.in_short = evaluator.in_full = with_moving
        return evaluator

    def peak_bytes(self, strategies) -> int:
        share = 1.5 if OFFLOAD in strategies else 1.0
        return int(self.estimated_bytes(strategies) * share)


def test_a_known_plan_that_moves_inputs_hides_no_faster_one_that_does_not():
    world = MovingIsLarger(seed=2, errors=False)
    world.sample_bytes = 800
    budget_bytes = world.estimated_bytes((BLOCKS[2],))
    known = next((each, OFFLOAD) for each in BLOCKS if world.fits((each, OFFLOAD), budget_bytes))
    search = search_of(world, budget_bytes, splits=(), fixed=())
    search._known = known
    found = search.run()
    assert found.strategies == (BLOCKS[2],)


class FewMovingAreLarger(MovingIsLarger):
    """All blocks but the last way to move inputs away take half as much again."""

    def peak_bytes(self, strategies) -> int:
        is_off = OFFLOAD in strategies and BLOCKS[-1] not in strategies
        return int(self.estimated_bytes(strategies) * (1.5 if is_off else 1.0))


def test_the_smallest_of_a_kind_is_tried_though_others_of_it_were_too_low():
    world = FewMovingAreLarger(seed=2, errors=False)
    world.sample_bytes = 800
    world.factors[FUSED] = 40.0  # a way out that is slow by far
    world.savings[FUSED] = 50_000
    smallest = (BLOCKS[-1], OFFLOAD)
    budget_bytes = world.estimated_bytes(smallest)
    assert not any(world.fits((each, OFFLOAD), budget_bytes) for each in BLOCKS[:-1])
    search = search_of(world, budget_bytes, splits=(), fixed=((None, FUSED),))
    node = SearchNode((), 0, None, world.evaluator(budget_bytes).in_short(()))
    search.tree.open(node)
    first, *_, last = [each for each in node.candidate.refinements if OFFLOAD in each.strategies]
    node.learn(first, world.evaluator(budget_bytes).in_short(first.strategies))
    assert node.expected_bytes(last) > 1.02 * budget_bytes
    assert search._may_fit(node, last)
    assert not search._may_fit(node, first)
