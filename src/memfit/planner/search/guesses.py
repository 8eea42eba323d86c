"""Guesses what is recorded next, so that other processes can begin with it; they decide nothing."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memfit.planner.search.candidates import Refinement, Strategies
from memfit.planner.search.first_guess import bytes_in_pieces
from memfit.planner.search.neighbours import Neighbours
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.queue import Entry
from memfit.planner.search.tree import SearchNode
from memfit.strategies.plan import splitting_of

_MOST = 3
"""So many entries of the queue may be recorded ahead of their turn."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """Say what is likely to be recorded after an entry of the queue."""

    space: SearchSpace
    neighbours: Neighbours
    may_fit: Callable[[SearchNode, Refinement], bool]
    """Whether a refinement of a node is worth recording."""

    def after(
        self, at_hand: Entry, waiting: Iterable[Entry], *, may_open: bool
    ) -> list[Strategies]:
        """Return what comes next: smaller pieces where these are too large, then what waits."""
        found: list[Strategies] = []
        if at_hand.is_node and self._is_too_large(at_hand.node):
            following = self.neighbours.instead(at_hand.node)
            found += [node.strategies for node in following if self._is_settled(node)]
        for entry in heapq.nsmallest(_MOST, waiting):
            if entry.refinement is not None and self.may_fit(entry.node, entry.refinement):
                found.append(entry.refinement.strategies)
            elif entry.is_node and may_open and self._is_settled(entry.node):
                found.append(entry.node.strategies)
        return found

    def _is_too_large(self, node: SearchNode) -> bool:
        """Guess whether pieces are over the budget, by what larger ones take."""
        before = node.parent
        if not node.split or before is None or before.candidate is None:
            return False
        larger = before.candidate.prediction.batch_size
        if before.split:
            larger = self.space.splits[before.split - 1].micro_batch_size
        budget_bytes = before.candidate.prediction.budget_bytes
        if not larger or not budget_bytes:
            return False
        share = self.space.splits[node.split - 1].micro_batch_size / larger
        return bytes_in_pieces(before.candidate, before.candidate.peak_bytes, share) > budget_bytes

    def _is_settled(self, node: SearchNode) -> bool:
        """Return whether a node's pieces are known by now to be such as may be taken."""
        split, checks = splitting_of(node.strategies), self.space.split_checks
        if split is None or checks is None:
            return True
        return checks.is_settled(split) and checks.obstacle(split) is None
