"""Bounds what pieces of a batch take, and what saves little; nothing is recorded for it.

What lives all the time stays, and nothing else grows faster than the pieces do, so a peak shrinks
at most as they do. Where it is a maximum of sums that are linear in the size of the pieces, it is
convex in it: a line through two sizes bounds every smaller one from below.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memfit.planner.search.candidates import Candidate
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.tree import LASTING, SearchNode, SearchTree
from memfit.strategies.base import AbstractSplitting
from memfit.trace.events import Category

TOLERANCE = 0.02
"""Estimated peaks that are over the budget by more than this share are not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
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


def line_through(node: SearchNode, space: SearchSpace) -> Line | None:
    """Return the line through a node and its parent, where they differ by their pieces alone."""
    before = node.parent
    if before is None or before.split >= node.split:
        return None
    mine, larger = node.candidate, before.candidate
    assert mine is not None, "only recorded nodes have children"
    assert larger is not None, "only recorded nodes have children"
    split, size = space.splits[node.split - 1], _size_of(before, space)
    larger_bytes = larger.floor_bytes
    if before.split == 0:
        if split.keeps_batch_whole or size is None:
            return None
        # Pieces have the gradients of those before them, which the whole batch has not.
        larger_bytes += larger.prediction.by_category.get(Category.PARAMETERS.value, 0)
    elif space.splits[before.split - 1].name != split.name:
        return None
    assert size is not None, "pieces have a size"
    return Line(
        kind=split.name,
        micro_batch_size=split.micro_batch_size,
        num_bytes=mine.floor_bytes,
        bytes_per_sample=(larger_bytes - mine.floor_bytes) / (size - split.micro_batch_size),
        most_bytes=_most_bytes(mine),
    )


def may_fit_as_it_is(parent: SearchNode, split: AbstractSplitting, space: SearchSpace) -> bool:
    """Return whether pieces of a size may fit with nothing recomputed, by what larger ones take."""
    whole, share = parent.candidate, _share(parent, split, space)
    if whole is None or share is None:
        return True
    return _least_bytes(whole, whole.peak_bytes, share) <= _most_bytes(whole)


def is_ruled_out(node: SearchNode, recorded: Iterable[SearchNode], space: SearchSpace) -> bool:
    """Return whether pieces cannot fit, by what others of the same combination took.

    Args:
        node: the pieces.
        recorded: nodes that were opened.
        space: what may be combined.
    """
    before = node.parent
    if before is None or node.split <= before.split:
        return False
    split = space.splits[node.split - 1]
    for other in recorded:
        if other.parent is not before or other.split in {before.split, node.split}:
            continue
        if space.splits[other.split - 1].name != split.name or other.candidate is None:
            continue
        if other.split > node.split:
            if other.candidate.floor_bytes > _most_bytes(other.candidate):
                return True  # smaller ones take no more
        elif (line := line_through(other, space)) is not None and not line.may_fit(split):
            return True
    return False


def is_hopeless(recorded: Iterable[Candidate], space: SearchSpace) -> bool:
    """Test whether what lives all the time and nothing acts on is over the budget by itself.

    Args:
        recorded: what was recorded, the step with what is required only first.
        space: what may be combined.
    """
    options = (*space.splits, *(o for os in space.options for o in os if o))
    reached = {category for option in options for category in option.acts_on}
    prediction = next(iter(recorded)).prediction
    least_bytes = sum(
        prediction.by_category.get(category.value, 0)
        for category in LASTING
        if category not in reached
    )
    return prediction.budget_bytes is not None and least_bytes > prediction.budget_bytes


def likely_pieces(whole: Candidate, space: SearchSpace) -> AbstractSplitting | None:
    """Return the largest pieces that may fit with nothing recomputed; None if none may."""
    node = SearchNode(whole.strategies, 0, None, whole)
    alike = (split for split in space.splits if not split.keeps_batch_whole)
    return next((split for split in alike if may_fit_as_it_is(node, split, space)), None)


def least_time_ratio(child: SearchNode, tree: SearchTree, space: SearchSpace) -> float:
    """Bound how many times as long a child takes as its parent, so that it fits.

    Where it fits only with blocks recomputed, it is what recomputing costs its parent, down to the
    last step that is known to be too little: nothing in pieces shrinks more than they do, and what
    acts on little saves no more than that.
    """
    parent = child.parent
    if parent is None or parent.candidate is None:
        return 1.0
    if child.split > parent.split:
        share = _share(parent, space.splits[child.split - 1], space)
        return 1.0 if share is None else _time_ratio_of_pieces(parent.candidate, share)
    saved_bytes = tree.most_saved_bytes(child)
    return 1.0 if saved_bytes is None else _time_ratio_of_saving(parent, saved_bytes)


def _time_ratio_of_pieces(whole: Candidate, share: float) -> float:
    ways = (
        (each.seconds, _least_bytes(whole, each.peak_bytes, share)) for each in whole.refinements
    )
    as_it_is_bytes = _least_bytes(whole, whole.peak_bytes, share)
    return _least_ratio(whole, as_it_is_bytes, ways, _most_bytes(whole))


def _time_ratio_of_saving(parent: SearchNode, saved_bytes: int) -> float:
    whole = parent.candidate
    assert whole is not None, "only recorded nodes have children"
    shown = (parent.correction_bytes(each) for each in whole.refinements)
    is_shown = any(each is not None for each in shown)  # how far off the estimates are
    most_bytes = (whole.prediction.budget_bytes or 0) if is_shown else _most_bytes(whole)
    ways = ((each.seconds, parent.expected_bytes(each)) for each in whole.refinements)
    return _least_ratio(whole, whole.peak_bytes, ways, most_bytes + saved_bytes)


def _least_ratio(
    whole: Candidate,
    peak_bytes: int,
    ways: Iterable[tuple[float, int]],
    most_bytes: int,
) -> float:
    """Return what the last way takes that is too large, as a multiple; the fastest come first."""
    known = whole.prediction.step_seconds
    if peak_bytes <= most_bytes:
        return 1.0
    seconds = known
    for each_seconds, each_bytes in ways:
        if each_bytes <= most_bytes:
            break
        seconds = each_seconds
    return max(1.0, seconds / known)


def lasting_bytes(whole: Candidate) -> int:
    """Return the bytes that live all the time."""
    return sum(whole.prediction.by_category.get(each.value, 0) for each in LASTING)


def _least_bytes(whole: Candidate, peak_bytes: int, share: float) -> int:
    """Bound the peak of pieces of a share of the size from below."""
    kept_bytes = lasting_bytes(whole)
    return kept_bytes + int(share * max(0, peak_bytes - kept_bytes))


def _most_bytes(candidate: Candidate) -> int:
    return int((candidate.prediction.budget_bytes or 0) * (1 + TOLERANCE))


def _share(parent: SearchNode, split: AbstractSplitting, space: SearchSpace) -> float | None:
    """Return how large pieces are to those of a parent; None where they don't shrink alike."""
    size = _size_of(parent, space)
    if size is None or split.keeps_batch_whole:
        return None
    return split.micro_batch_size / size


def _size_of(node: SearchNode, space: SearchSpace) -> int | None:
    if node.split:
        return space.splits[node.split - 1].micro_batch_size
    assert node.candidate is not None, "only recorded nodes have children"
    return node.candidate.prediction.batch_size
