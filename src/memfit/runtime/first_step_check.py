"""Tries on a run's own batch whether its gradients depend on how the batch is cut."""

from __future__ import annotations

from typing import Any

from memfit.errors import NotSeparableError
from memfit.runtime.split_comparison import compare_splits, other_split
from memfit.session.session import Session
from memfit.strategies.base import AbstractSplitting


def check_split(session: Session, split: AbstractSplitting, batch: Any) -> str:
    """Hold a plan's pieces against pieces of half the size, and say what they show.

    Costs about a step without its update, which is not carried out. Random draws are stilled.

    Args:
        session: with the plan's strategies applied.
        split: what could not be followed.
        batch: on the session's device.

    Raises:
        NotSeparableError: if the gradients differ; nothing was changed.
    """
    other = other_split(split, session.layout.num_samples(batch), whole=False)
    compared = compare_splits(session, batch, split, other)
    if compared.unstilled:
        return (
            f"this batch could not tell, since the step depends on random draws that cannot be "
            f"stilled ({', '.join(compared.unstilled)})."
        )
    if not compared.is_equal:
        raise NotSeparableError(
            split.label(),
            f"on this batch its gradients are not those of {other.label()}: that of "
            f"{compared.worst} differs by {compared.error:.2g} (relative, {compared.dtype}; "
            f"rounding explains {compared.bound:.0e}).",
        )
    return (
        f"on this batch its gradients are those of {other.label()} (largest relative error "
        f"{compared.error:.1g}, {compared.dtype})."
    )
