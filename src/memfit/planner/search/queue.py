"""What waits in the search's queue, the fastest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from memfit.planner.search.candidates import Candidate, Refinement, Strategies
from memfit.planner.search.tree import SearchNode


@dataclass(slots=True, order=True)
class Entry:
    """Something in the queue: a node to open, a refinement to record, or a recorded candidate."""

    seconds: float
    peak_bytes: int
    labels: tuple[str, ...]
    node: SearchNode = field(compare=False)
    refinement: Refinement | None = field(compare=False, default=None)
    candidate: Strategies | None = field(compare=False, default=None)

    @property
    def is_node(self) -> bool:
        """Return whether it is a node to open."""
        return self.refinement is None and self.candidate is None


class SearchQueue:
    """Hold entries in the order of the least time that they can take."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def push_node(self, node: SearchNode, least_seconds: float) -> None:
        """Add a node to open."""
        # Halving is tried before other strategies that may cost as little: it can save most.
        self._push(Entry(least_seconds, -node.split, _order(node.strategies), node))

    def push_refinement(self, node: SearchNode, refinement: Refinement) -> None:
        """Add a refinement of a node, by its estimates."""
        labels = _order(refinement.strategies)
        entry = Entry(refinement.seconds, refinement.peak_bytes, labels, node, refinement)
        self._push(entry)

    def push_candidate(self, node: SearchNode, candidate: Candidate) -> None:
        """Add what was recorded, of a node or of a refinement of it."""
        seconds, strategies = candidate.prediction.step_seconds, candidate.strategies
        labels = _order(strategies)
        self._push(Entry(seconds, candidate.peak_bytes, labels, node, candidate=strategies))

    def pop(self) -> Entry:
        """Take what could be fastest."""
        return heapq.heappop(self.entries)

    def take(self, entry: Entry) -> Entry:
        """Take an entry, wherever it stands."""
        self.entries.remove(entry)
        heapq.heapify(self.entries)
        return entry

    def keep_where(self, is_wanted: Callable[[Entry], bool]) -> None:
        """Drop the entries that are not wanted any more."""
        self.entries = [entry for entry in self.entries if is_wanted(entry)]
        heapq.heapify(self.entries)

    def _push(self, entry: Entry) -> None:
        heapq.heappush(self.entries, entry)


def _order(strategies: Strategies) -> tuple[str, ...]:
    """Settle ties: the fewest strategies first, then by name."""
    return (str(len(strategies)), *(strategy.label() for strategy in strategies))
