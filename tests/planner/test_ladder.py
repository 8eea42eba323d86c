"""The rungs below a plan are found with few recordings."""

from __future__ import annotations

from tests.planner.test_search import BLOCKS, World, search_of

from memfit.planner.result.ladder import Ladder


class Hopeful(World):
    """A job whose recomputed blocks all take far more than was estimated."""

    def peak_bytes(self, strategies) -> int:
        more = 50_000 if self.num_recomputed(strategies) else 0
        return self.estimated_bytes(strategies) + more


def test_estimates_that_turn_out_wrong_are_not_believed_again():
    world = Hopeful(seed=1)
    search = search_of(world, 10 * world.peak_bytes(()), splits=())
    best = search.run()
    world.short.clear()
    assert Ladder(search).fastest_below(world.estimated_bytes((BLOCKS[2],))) is None
    refined = [strategies for strategies in world.short if world.num_recomputed(strategies)]
    nodes = {tuple(s for s in strategies if s not in BLOCKS) for strategies in refined}
    assert best is not None
    assert len(refined) == len(nodes) > 0  # the first of each says what the others would take
