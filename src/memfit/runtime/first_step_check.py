"""Tries on a run's own batch whether its gradients depend on how the batch is cut."""

from __future__ import annotations

from typing import Any

from memfit.errors import NotSeparableError
from memfit.runtime.split_comparison import compare_splits
from memfit.runtime.split_pass import difference_of, other_split, split_pass
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
    compared = compare_splits(
        session,
        batch,
        (other.micro_batch_size, split.micro_batch_size),
        gradient_pass=split_pass(split),
        copies_parameters=False,
    )
    if compared.unstilled:
        return (
            f"this batch could not tell, since the step depends on random draws that cannot be "
            f"stilled ({', '.join(compared.unstilled)})."
        )
    if not compared.agrees:
        raise NotSeparableError(
            split.label(),
            f"on this batch it does not do what {other.label()} does: {difference_of(compared)} "
            f"(rounding explains {compared.bound:.0e}).",
        )
    return (
        f"on this batch its gradients are those of {other.label()} (largest relative error "
        f"{compared.largest_error:.1g}, {compared.dtype})."
    )
