"""The combinations that the search has opened, and what their members were seen to cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from memfit.planner.search.candidates import Candidate, Refinement, Strategies
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.recordings import Recordings
from memfit.strategies.base import Strategy
from memfit.trace.events import Category, Phase

LASTING = (Category.PARAMETERS, Category.BUFFERS, Category.OPTIMIZER_STATE)
"""What lives all the time."""
_LITTLE = 0.01
"""Of the budget: what cannot save more is combined only with what nearly fits."""


@dataclass(slots=True, eq=False)
class SearchNode:
    """A combination without recomputation."""

    strategies: Strategies
    split: int
    """How often the batch is halved."""
    parent: SearchNode | None
    candidate: Candidate | None = None
    """What recording it gave when it was opened."""
    _corrections_bytes: dict[frozenset[str], int] = field(default_factory=dict)
    """What the last recorded refinement of each kind took more than was estimated."""
    skipped: list[Refinement] = field(default_factory=list)
    """Refinements that were not recorded, because they were estimated to be too large."""

    def learn(self, refinement: Refinement, candidate: Candidate) -> None:
        """Note by how much a refinement's estimate was off, once it is recorded."""
        self._corrections_bytes[self.kind_of(refinement)] = (
            candidate.peak_bytes - refinement.peak_bytes
        )

    def kind_of(self, refinement: Refinement) -> frozenset[str]:
        """Name what a refinement adds: what moves inputs away is estimated less well."""
        present = {strategy.name for strategy in self.strategies}
        return frozenset(each.name for each in refinement.strategies) - present

    def smallest_like(
        self, refinement: Refinement, refinements: Sequence[Refinement]
    ) -> Refinement | None:
        """Return the last, and so the smallest, of a refinement's kind."""
        kind = self.kind_of(refinement)
        return next((each for each in reversed(refinements) if self.kind_of(each) == kind), None)

    def correction_bytes(self, refinement: Refinement) -> int | None:
        """Return by how much others of the kind were off; None if none was recorded."""
        return self._corrections_bytes.get(self.kind_of(refinement))

    def expected_bytes(self, refinement: Refinement) -> int:
        """Estimate a refinement's peak, by what others of its kind have shown."""
        return refinement.peak_bytes + (self.correction_bytes(refinement) or 0)

    @property
    def root(self) -> SearchNode:
        """Return the node that it comes from, one strategy or halving at a time."""
        return self if self.parent is None else self.parent.root


class SearchTree:
    """Open nodes, and learn from each what its new member costs and saves."""

    def __init__(self, recordings: Recordings, space: SearchSpace) -> None:
        self._recordings = recordings
        self._space = space
        self.nodes: list[SearchNode] = []
        self._time_ratios: dict[Strategy, float] = {}
        self._savings_bytes: dict[Strategy, int] = {}
        self._with_little: set[Strategy] = set()

    def refinements(self) -> Iterator[tuple[SearchNode, Refinement]]:
        """Yield every refinement that was estimated, recorded or not, with its node."""
        for node in self.nodes:
            if node.candidate is not None:
                yield from ((node, refinement) for refinement in node.candidate.refinements)

    def open(self, node: SearchNode, least_fraction: float = 0.0) -> bool:
        """Record a node; False if it cannot be smaller than the node it came from.

        It has to be smaller by more than a part of the budget, unless it fits.
        """
        mine = self._recordings.attempt(node.strategies)
        if mine is None:
            return False
        node.candidate = mine
        if node not in self.nodes:
            self.nodes.append(node)
        if node.parent is None or node.parent.candidate is None:
            return True
        if self._space.must_split and node.split == 1:
            return True
        before = node.parent.candidate
        for added in set(node.strategies) - set(node.parent.strategies) - set(self._time_ratios):
            # The others were added before, so what each of them costs is known.
            ratio = mine.prediction.step_seconds / self.expected_seconds(node)
            self._time_ratios[added] = ratio * self._space.slowdowns.get(added, 1.0)
            self._savings_bytes[added] = before.floor_bytes - mine.floor_bytes
        if mine.prediction.fits:
            least_fraction = 0.0
        least_bytes = int(least_fraction * (mine.prediction.budget_bytes or 0))
        saved_bytes = max(
            before.peak_bytes - mine.peak_bytes, before.floor_bytes - mine.floor_bytes
        )
        if 0 < saved_bytes <= least_bytes and node.split == node.parent.split:
            self._with_little |= set(node.strategies) - set(node.parent.strategies)
        return saved_bytes > least_bytes

    def adds_little(self, node: SearchNode) -> bool:
        """Return whether what is new in a node was seen to save next to nothing elsewhere."""
        before = () if node.parent is None else node.parent.strategies
        added = set(node.strategies) - set(before)
        return bool(added) and added <= self._with_little

    def acts_on_little(self, node: SearchNode) -> bool:
        """Return whether what is new in a node acts on next to nothing, however it is combined."""
        most_bytes = self.most_saved_bytes(node)
        prediction = next(iter(self._recordings.tried.values())).prediction
        return most_bytes is not None and most_bytes <= _LITTLE * (prediction.budget_bytes or 0)

    def most_saved_bytes(self, node: SearchNode) -> int | None:
        """Bound what is new in a node can save; None where it acts on what grows with the batch."""
        before = () if node.parent is None else node.parent.strategies
        added = [each for each in node.strategies if each not in before]
        reached = [_bounded_by(category, each) for each in added for category in each.acts_on]
        known = next(iter(self._recordings.tried.values())).prediction.by_category
        if not reached or any(each not in LASTING or each.value not in known for each in reached):
            return None
        return sum(known[each.value] for each in reached)

    def expected_seconds(self, node: SearchNode) -> float:
        """Multiply the root's time by what each further member was seen or is known to cost."""
        root = node.root
        seconds = self._recordings.of(root.strategies).prediction.step_seconds
        for member in node.strategies:
            if member not in root.strategies:
                known = self._space.slowdowns.get(member, 1.0)
                seconds *= self._time_ratios.get(member, known)
        return seconds

    def expected_floor_bytes(self, node: SearchNode) -> int:
        """Estimate the smallest peak of a combination; nothing is known of what is new in it."""
        if node.parent is None or node.parent.candidate is None:
            return 0
        added = set(node.strategies) - set(node.parent.strategies)
        if not added <= set(self._savings_bytes):
            return 0
        saved_bytes = sum(self._savings_bytes[strategy] for strategy in added)
        return node.parent.candidate.floor_bytes - saved_bytes

    def floor(self, node: SearchNode) -> tuple[bool, int]:
        """Order nodes by the smallest peak to be expected; what is not allowed comes last."""
        floor_bytes = self._recordings.of(node.strategies).floor_bytes
        return not self._space.allows(node.strategies), floor_bytes


def _bounded_by(category: Category, strategy: Strategy) -> Category:
    """Return what lives all the time and is as large as what a strategy acts on, if anything is.

    Gradients are, and so is about what an update makes on the way.
    """
    is_of_update = category is Category.TEMPORARIES and strategy.acts_in == (Phase.OPTIMIZER,)
    return Category.PARAMETERS if is_of_update or category is Category.GRADIENTS else category
