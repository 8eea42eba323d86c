"""Steps from one combination to the next: one strategy more, or the batch halved once more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from memfit.planner.search.candidates import Strategies
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.pieces import line_through, may_fit_as_it_is
from memfit.planner.search.refinements import without_recomputation
from memfit.planner.search.tree import SearchNode
from memfit.strategies.base import Strategy
from memfit.strategies.plan import conflict, in_catalogue_order, splitting_of


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
        """Yield what takes the place of a child whose pieces may not be taken: smaller ones."""
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

    def perhaps_faster(self, strategies: Strategies) -> Iterator[Strategies]:
        """Yield what estimates tell least from a combination, for what caches do with it.

        That is the next smaller micro-batch, with the same blocks recomputed and with none, one
        more of what is said to cost little, such as an optimizer that steps in the backward, and
        one less of what may be left out.
        """
        for whole in dict.fromkeys((strategies, without_recomputation(strategies))):
            halved = self.halved(whole)
            if halved is not None:
                yield halved
        for options in self._space.options:
            mildest = next((each for each in options if each is not None), None)
            others = [member for member in strategies if member not in options]
            wanted: list[Strategy] | None = None
            if len(others) < len(strategies):
                wanted = others if None in options else None
            elif mildest is not None and mildest.costs_little:
                wanted = [*strategies, mildest]
            if wanted is not None:
                yield from (node.strategies for node in self._node(wanted, 0))

    def _smaller_pieces(
        self, strategies: Strategies, parent: SearchNode | None = None
    ) -> Iterator[SearchNode]:
        """Yield the combination with the next smaller pieces that keep the results, if any."""
        splits, own = self._space.splits, splitting_of(strategies)
        bare = None if own is None else own.keeping(0) or own
        position = next((n for n, split in enumerate(splits, 1) if split == bare), 0)
        for place, split in enumerate(splits[position:], position + 1):
            if self._space.obstacle([split]) is None:
                yield from self._in_pieces(strategies, place, parent)
                return

    def _next_pieces(
        self, strategies: Strategies, parent: SearchNode, position: int
    ) -> Iterator[SearchNode]:
        """Yield the combination with pieces after a position among the splits, from the largest on.

        The last are the first that may fit with nothing recomputed. Sizes that are over the budget
        by a line that bounds them from below are passed over.
        """
        line = line_through(parent, self._space)
        for place, split in enumerate(self._space.splits[position:], position + 1):
            if line is None or line.may_fit(split):
                yield from self._in_pieces(strategies, place, parent)
                if may_fit_as_it_is(parent, split, self._space):
                    return

    def _in_pieces(
        self, strategies: Strategies, place: int, parent: SearchNode | None
    ) -> Iterator[SearchNode]:
        whole = [member for member in strategies if member.splitting is None]
        yield from self._node([*whole, self._space.splits[place - 1]], place, parent)

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
