"""Records what is likely to fit before the search looks for the best, to have a plan soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from memfit.planner.search.candidates import Refinement, Strategies
from memfit.planner.search.first_guess import SPARING, likely_to_fit, piece_guesses
from memfit.planner.search.neighbours import Neighbours
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.recordings import Recordings
from memfit.planner.search.starting_points import likely_start
from memfit.planner.search.tree import SearchNode, SearchTree

_MOST_GUESSES = 2
"""So many pieces of a batch are tried."""
_MOST_TRIES = 2
"""So many ways to recompute blocks are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlan:
    """Look for some plan that fits; what is recorded for it serves the search as well."""

    recordings: Recordings
    neighbours: Neighbours
    tree: SearchTree
    space: SearchSpace
    try_refinement: Callable[[SearchNode, Refinement], None]
    """Records a refinement unless it is estimated to be far over the budget."""
    is_found: Callable[[], bool]
    """Says whether something that fits was recorded."""

    def begin(self) -> list[Strategies]:
        """Record what the search is likely to begin with, and return it with what may follow."""
        likely = likely_start(self.recordings, self.space)
        for strategies in likely[:1]:
            self.recordings.attempt(strategies)
        return likely

    def go_on(self, likely: list[Strategies]) -> None:
        """Record what is likely to fit, where what the search is likely to begin with does not."""
        for strategies in likely[1:]:
            if not self.is_found():
                self.recordings.attempt(strategies)
        for strategies in likely[:1]:
            self._try_guess(strategies)

    def look_for_any(self) -> None:
        """Record what is estimated to fit with room to spare.

        What was recorded alone and found slower counts as well.
        """
        opened = {node.strategies for node in self.tree.nodes}
        alone = (c for c in self.recordings.tried.values() if c.strategies not in opened)
        nodes = (*self.tree.nodes, *(SearchNode(c.strategies, 0, None, c) for c in alone))
        fitting = [
            (refinement.seconds, refinement.peak_bytes, node, refinement)
            for node in nodes
            if node.candidate is not None and self.space.allows(node.strategies)
            for refinement in node.candidate.refinements
            if refinement.peak_bytes <= SPARING * self._budget_bytes(node)
        ]
        if fitting:
            *_, node, refinement = min(fitting, key=lambda each: each[:2])
            self.try_refinement(node, refinement)
        elif self.tree.nodes:
            self._look_for_pieces()

    def _look_for_pieces(self) -> None:
        """Record what may fit, for some plan: what costs little, pieces, then what saves most."""
        for strategies in self._likely_smaller():
            self._try_guess(strategies)
            recorded = self.recordings.tried.get(strategies)
            # What fits in short is recorded in full where nothing faster turns out to fit.
            if self.is_found() or (recorded is not None and recorded.prediction.fits):
                return

    def _likely_smaller(self) -> Iterator[Strategies]:
        """Yield what may fit; whether pieces may be taken is asked only where it comes to that.

        What is known to take several steps' time takes as long to record, and is left to the
        search.
        """
        root = self.recordings.of(self.tree.nodes[0].strategies)
        yield from (node.strategies for node in self.neighbours.mildest(root.strategies))
        guesses = piece_guesses(root, [*self.recordings.tried.values()], self.space)
        quick = (each.strategies for each in guesses if not self._is_slow(each.strategies))
        yield from islice(quick, _MOST_GUESSES)
        for node in self.neighbours.strongest():
            if not self._is_slow(node.strategies):
                yield node.strategies

    def _is_slow(self, strategies: Strategies) -> bool:
        return any(self.space.slowdowns.get(each, 1.0) > 1.0 for each in strategies)

    def _try_guess(self, strategies: Strategies) -> None:
        """Record a combination for some plan; recompute blocks where that is estimated to do.

        Where it does not, that shows how far off the estimates are, and one more try is made.
        """
        found = self.recordings.attempt(strategies) if self.space.allows(strategies) else None
        if found is None or found.prediction.fits or self.is_found():
            return
        node = SearchNode(found.strategies, 0, None, found)
        for _ in range(_MOST_TRIES):
            enough = likely_to_fit(found, self._budget_bytes(node), node.expected_bytes)
            if enough is None or self.is_found():
                return
            self.try_refinement(node, enough)

    def _budget_bytes(self, node: SearchNode) -> int:
        return self.recordings.of(node.strategies).prediction.budget_bytes or 0
