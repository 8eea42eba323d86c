"""Cuts a batch in another way than a plan does, so that the two can be held against each other."""

from __future__ import annotations

from typing import Any

import torch

from memfit.runtime.split_comparison import SplitComparison
from memfit.session.session import GradientPass, PhaseListener, Session
from memfit.strategies.base import AbstractSplitting


def other_split(split: AbstractSplitting, num_samples: int, *, whole: bool) -> AbstractSplitting:
    """Give another way to cut a batch: not at all, or into pieces of half the size.

    Pieces of one sample are held against pieces of two.
    """
    half = max(1, split.micro_batch_size // 2)
    other = half if half < split.micro_batch_size else 2
    return _resized(split, num_samples if whole else other)


def split_pass(split: AbstractSplitting) -> GradientPass:
    """Give what computes gradients as a strategy does, in pieces of the session's size."""

    def gradient_pass(session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
        undo = _resized(split, session.micro_batch_size).apply(session)
        try:
            return session.gradient_pass(session, batch, enter_phase)
        finally:
            undo()

    return gradient_pass


def difference_of(compared: SplitComparison) -> str:
    """Say in a clause what two ways to cut a batch do differently."""
    if compared.largest_error <= compared.bound and compared.effects:
        return compared.effects[0]
    what = compared.worst_parameter
    of = what if what == "the loss" else f"the gradient of {what}"
    return f"{of} differs by {compared.largest_error:.2g} (relative, {compared.dtype})"


def _resized(split: AbstractSplitting, micro_batch_size: int) -> AbstractSplitting:
    return type(split)(**{**split.settings(), "micro_batch_size": micro_batch_size})
