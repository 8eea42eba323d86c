"""Says which smaller plan is held in reserve of one in pieces, before that one is recorded.

Where recording takes long, another process records it meanwhile.
"""

from __future__ import annotations

from memfit.planner.search.candidates import Candidate, Strategies
from memfit.planner.search.first_guess import bytes_in_pieces
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.pieces import may_fit_as_it_is
from memfit.planner.search.tree import SearchNode
from memfit.strategies.base import AbstractSplitting
from memfit.strategies.plan import conflict, in_catalogue_order

RESERVE_SHARE = 0.7
"""The peak of the plan in reserve, at most, as a share of the chosen one's."""
_MARGIN = 0.98
"""Of that peak: pieces take about what is estimated, by what the whole batch takes."""


def reserve_beside(node: SearchNode, space: SearchSpace) -> Strategies | None:
    """Return what will be held in reserve of a node, if it is pieces that are likely to fit.

    That can be recorded beside the node.
    """
    whole = node.parent
    while whole is not None and whole.split:
        whole = whole.parent
    if not node.split or whole is None or whole.candidate is None:
        return None
    split = space.splits[node.split - 1]
    if not may_fit_as_it_is(whole, split, space):
        return None
    return reserve_in_pieces(whole.candidate, split)


def reserve_in_pieces(whole: Candidate, split: AbstractSplitting) -> Strategies | None:
    """Return the fastest way to recompute blocks in pieces that is well below not to do so.

    Args:
        whole: the same combination on the whole batch, as recorded.
        split: the pieces.

    Returns:
        None where nothing is estimated to be so small.
    """
    num_samples = whole.prediction.batch_size
    if split.keeps_batch_whole or not num_samples:
        return None
    share = split.micro_batch_size / num_samples
    most_bytes = _MARGIN * RESERVE_SHARE * bytes_in_pieces(whole, whole.peak_bytes, share)
    for refinement in whole.refinements:
        if bytes_in_pieces(whole, refinement.peak_bytes, share) <= most_bytes:
            found = in_catalogue_order((*refinement.strategies, split))
            return None if conflict(found) else found
    return None
