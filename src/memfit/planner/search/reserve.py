"""Says which smaller plan is held in reserve of one in pieces, before that one is recorded.

Where recording takes long, another process records it meanwhile.
"""

from __future__ import annotations

from memfit.planner.search.candidates import Candidate, Strategies
from memfit.planner.search.first_guess import bytes_in_pieces
from memfit.strategies.base import AbstractSplitting
from memfit.strategies.plan import conflict, in_catalogue_order

RESERVE_SHARE = 0.7
"""The peak of the plan in reserve, at most, as a share of the chosen one's."""
_MARGIN = 0.98
"""Of that peak: pieces take about what is estimated, by what the whole batch takes."""


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
