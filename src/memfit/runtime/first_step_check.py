"""Tries on a real batch whether gradients depend on how it is cut."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from memfit.comparison.gradients import accumulate_gradients
from memfit.comparison.split_comparison import SplitComparison, compare_splits
from memfit.errors import NotSeparableError
from memfit.session.session import GradientPass, PhaseListener, Session
from memfit.strategies.base import AbstractSplitting


def check_split(
    session: Session, split: AbstractSplitting, batch: Any, is_bounded: bool
) -> tuple[bool, str]:
    """Hold a plan's pieces against pieces of another size; say whether they show it, and what.

    Costs about a step without its update, which is not run, in memory as well: what is compared
    lies on the disk. Random draws are made deterministic.

    Args:
        session: with the plan's strategies applied.
        split: what could not be followed.
        batch: on the session's device.
        is_bounded: whether nothing is tried that may take more than a step of the plan.

    Raises:
        NotSeparableError: if the gradients differ; nothing was changed.
    """
    # Where every piece is a pass of all ranks, smaller ones may be more than a rank has samples.
    doubled = 2 * split.micro_batch_size
    size = other_size(split) if session.agreement is None else doubled
    if is_bounded and (size > split.micro_batch_size or session.updates_in_backward):
        why = "all gradients" if session.updates_in_backward else split.with_size(size).label()
        return False, f"nothing, since {why} may take more memory than the plan."
    compared = compared_with(session, split, batch, size)
    if compared.still_random:
        return False, (
            "this batch could not tell, since the step depends on random draws that cannot be "
            f"made deterministic ({', '.join(compared.still_random)})."
        )
    if not compared.agrees:
        raise NotSeparableError(split.label(), difference(split, compared))
    return True, equality(split, compared)


def compared_with(
    session: Session,
    split: AbstractSplitting,
    batch: Any,
    reference_size: int,
    dtype: torch.dtype | None = None,
    *,
    keeps_casts: bool = False,
) -> SplitComparison:
    """Compare a plan's pieces with pieces of another size.

    Args:
        session: with the plan's strategies applied, or without any.
        split: how the plan cuts batches.
        batch: on the session's device.
        reference_size: of the other pieces, in samples.
        dtype: the type to compute in; None takes the session's own.
        keeps_casts: whether what the step casts from fp64 to less stays in fp64.
    """
    return compare_splits(
        session,
        batch,
        (reference_size, split.micro_batch_size),
        dtype=dtype,
        keeps_casts=keeps_casts,
        gradient_pass=_pass_of(split),
    )


def other_size(split: AbstractSplitting) -> int:
    """Return half the size of a plan's pieces; pieces of one sample are held against two."""
    return max(1, split.micro_batch_size // 2) if split.micro_batch_size > 1 else 2


def equality(split: AbstractSplitting, compared: SplitComparison) -> str:
    """Say that the pieces of both sizes have the same gradients, and how closely."""
    return (
        f"on one batch its gradients are those of {_other(split, compared)} (largest relative "
        f"error {compared.largest_error:.1g}, {compared.dtype})."
    )


def difference(split: AbstractSplitting, compared: SplitComparison) -> str:
    """Return how far the gradients of the pieces of both sizes are apart, and where."""
    if compared.largest_error <= compared.bound:
        return (
            f"on a real batch it leaves something else than {_other(split, compared)} does: "
            f"{'; '.join(compared.effects)}."
        )
    return (
        f"on a real batch its gradients are not those of {_other(split, compared)}: that of "
        f"{compared.worst_parameter} differs by {compared.largest_error:.2g} (relative, "
        f"{compared.dtype}; rounding explains {compared.bound:.0e})."
    )


def _other(split: AbstractSplitting, compared: SplitComparison) -> str:
    return split.with_size(compared.sizes[0]).label()


def _pass_of(split: AbstractSplitting) -> GradientPass:
    """Return a gradient pass that cuts batches as a strategy does, in the session's size."""

    def gradient_pass(session: Session, batch: Any, enter_phase: PhaseListener) -> torch.Tensor:
        with ExitStack() as undos:
            undos.callback(setattr, session, "gradient_pass", session.gradient_pass)
            if session.updates_in_backward:  # it would leave no gradients to be compared
                session.gradient_pass = accumulate_gradients
            own = replace(split, micro_batch_size=session.micro_batch_size)
            undos.callback(own.apply(session))
            return session.gradient_pass(session, batch, enter_phase)

    return gradient_pass
