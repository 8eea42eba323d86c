"""Steps from one combination to the next: one strategy more, or the batch halved once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memfit.planner.search.candidates import Strategies
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.tree import SearchNode
from memfit.strategies.base import AbstractSplitting, Strategy
from memfit.strategies.plan import conflict, in_catalogue_order
from memfit.trace.events import Category

TOLERANCE = 0.02
"""Estimated peaks that are over the budget by more than this share are not recorded."""


class Neighbours:
    """Give the combinations around one, leaving out what is in conflict or was refused."""

    def __init__(self, space: SearchSpace, refused: Mapping[str, str]) -> None:
        self._space = space
        self._refused = refused

    def children(self, node: SearchNode) -> Iterator[SearchNode]:
        """Yield the combinations with one strategy or one halving more.

        Strategies are added to the whole batch, so that each combination is reached one way.
        Whether the pieces of a halving keep the results is left to who opens it, as that may take
        seconds to find out.
        """
        if node.split == 0:
            yield from self._with_one_more(node)
        yield from self._next_pieces(node.strategies, node, node.split)

    def instead(self, node: SearchNode) -> Iterator[SearchNode]:
        """Yield what takes the place of a child whose pieces may not be taken: the next smaller."""
        if node.parent is not None:
            yield from self._next_pieces(node.parent.strategies, node.parent, node.split)

    def smaller(self, node: SearchNode) -> Iterator[SearchNode]:
        """Yield whatever could be smaller than a node by one strategy or one halving."""
        yield from self._with_one_more(node)
        yield from self._smaller_pieces(node.strategies, node)

    def strongest(self) -> Iterator[SearchNode]:
        """Yield the last settings of everything that goes together, on the whole batch and split.

        Whatever comes first keeps out what is in conflict with it.
        """
        settings = [options[-1] for options in self._space.options if options[-1] is not None]
        yield from self._node(_compatible(settings), 0)
        splits = self._space.splits
        for position in range(len(splits), 0, -1):
            split = splits[position - 1]
            if self._space.obstacle([split]) is None:
                yield from self._node(_compatible([split, *settings]), position)
                return

    def mildest(self, root: Strategies) -> Iterator[SearchNode]:
        """Yield a combination with all that is said to cost little, in its mildest setting."""
        firsts = (next((o for o in options if o), None) for options in self._space.options)
        mild = [option for option in firsts if option is not None and option.costs_little]
        names = {member.name for member in root}
        added = [option for option in mild if option.name not in names]
        if added:
            yield from self._node(_compatible([*root, *added]), 0)

    def halved(self, strategies: Strategies) -> Strategies | None:
        """Return a combination with the next smaller micro-batch; None if there is none."""
        return next((node.strategies for node in self._smaller_pieces(strategies)), None)

    def _smaller_pieces(
        self, strategies: Strategies, parent: SearchNode | None = None
    ) -> Iterator[SearchNode]:
        """Yield the combination with the next smaller pieces that keep the results, if any."""
        splits = self._space.splits
        position = next((n for n, split in enumerate(splits, 1) if split in strategies), 0)
        for place, split in enumerate(splits[position:], position + 1):
            if self._space.obstacle([split]) is None:
                yield from self._in_pieces(strategies, place, parent)
                return

    def _next_pieces(
        self, strategies: Strategies, parent: SearchNode, position: int
    ) -> Iterator[SearchNode]:
        """Yield the combination with the first pieces after a position among the splits, if any.

        Sizes that are over the budget by a line that bounds them from below are passed over.
        """
        line = self._line_through(parent)
        for place, split in enumerate(self._space.splits[position:], position + 1):
            if line is None or line.may_fit(split):
                yield from self._in_pieces(strategies, place, parent)
                return

    def _in_pieces(
        self, strategies: Strategies, place: int, parent: SearchNode | None
    ) -> Iterator[SearchNode]:
        splits = self._space.splits
        whole = [member for member in strategies if member not in splits]
        yield from self._node([*whole, splits[place - 1]], place, parent)

    def _with_one_more(self, node: SearchNode) -> Iterator[SearchNode]:
        for options in self._space.options:
            others = [member for member in node.strategies if member not in options]
            present = [member for member in node.strategies if member in options]
            for option in _next_options(options, present):
                yield from self._node((*others, option), node.split, node)

    def _node(
        self, members: Sequence[Strategy], split: int, parent: SearchNode | None = None
    ) -> Iterator[SearchNode]:
        """Yield a node unless its strategies don't go together, or one of them was refused."""
        strategies = in_catalogue_order(members)
        is_refused = any(strategy.name in self._refused for strategy in strategies)
        if not is_refused and not conflict(strategies):
            yield SearchNode(strategies, split, parent)

    def _line_through(self, node: SearchNode) -> _Line | None:
        """Return the line through a node and its parent, where they differ by their pieces alone.

        The peak is convex in the micro-batch (a maximum of sums that are linear in it), so the
        line through two sizes bounds every smaller one from below.
        """
        before = node.parent
        if before is None or before.split >= node.split:
            return None
        mine, larger = node.candidate, before.candidate
        assert mine is not None, "only recorded nodes have children"
        assert larger is not None, "only recorded nodes have children"
        split = self._space.splits[node.split - 1]
        larger_bytes = larger.floor_bytes
        if before.split == 0:
            whole = larger.prediction.batch_size
            if split.keeps_batch_whole or whole is None:
                return None
            size = whole
            # Pieces have the gradients of those before them, which the whole batch has not.
            larger_bytes += larger.prediction.by_category.get(Category.PARAMETERS.value, 0)
        else:
            same = self._space.splits[before.split - 1]
            if same.name != split.name:
                return None
            size = same.micro_batch_size
        return _Line(
            kind=split.name,
            micro_batch_size=split.micro_batch_size,
            num_bytes=mine.floor_bytes,
            bytes_per_sample=(larger_bytes - mine.floor_bytes) / (size - split.micro_batch_size),
            most_bytes=int((mine.prediction.budget_bytes or 0) * (1 + TOLERANCE)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A lower bound of the peak of pieces below some size."""

    kind: str
    micro_batch_size: int
    num_bytes: int
    bytes_per_sample: float
    most_bytes: int

    def may_fit(self, split: AbstractSplitting) -> bool:
        """Return whether pieces of a size can fit; nothing is known of those of another kind."""
        fewer = self.micro_batch_size - split.micro_batch_size
        return (
            split.name != self.kind
            or self.num_bytes - self.bytes_per_sample * fewer <= self.most_bytes
        )


def _compatible(strategies: Iterable[Strategy]) -> list[Strategy]:
    """Leave out what is in conflict with something before it."""
    kept: list[Strategy] = []
    for strategy in strategies:
        if not conflict([*kept, strategy]):
            kept.append(strategy)
    return kept


def _next_options(
    options: Sequence[Strategy | None], present: Sequence[Strategy]
) -> list[Strategy]:
    """Return the settings of one strategy to try next, besides the one that is there.

    Settings that can only cost time are ordered from the mildest, so each is tried after the one
    before it.
    """
    all_of_it = [option for option in options if option is not None]
    if not all(option.never_faster for option in all_of_it):
        return [option for option in all_of_it if option not in present]
    following = all_of_it.index(present[0]) + 1 if present else 0
    return all_of_it[following : following + 1]
