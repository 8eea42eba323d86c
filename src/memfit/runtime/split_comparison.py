"""Compares the gradients of a batch that is cut in two ways, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.runtime.comparison import relative_errors
from memfit.session.session import Session
from memfit.session.stilled_randomness import StilledRandomness, untouched_randomness
from memfit.strategies.base import AbstractSplitting

_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}
_COARSEST_BOUND = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitComparison:
    """How far apart the gradients of two ways to cut a batch are.

    Attributes:
        error: the largest relative error of a parameter's gradient, as a fraction.
        worst: the parameter that it belongs to.
        bound: up to this error they are equal up to rounding.
        dtype: the floating-point type of the comparison.
        num_draws: how many random draws were stilled.
        unstilled: operators whose draws could not be stilled.
    """

    error: float
    worst: str
    bound: float
    dtype: str
    num_draws: int = 0
    unstilled: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Say whether the gradients are the same up to rounding."""
        return self.error <= self.bound


def compare_splits(
    session: Session, batch: Any, split: AbstractSplitting, other: AbstractSplitting
) -> SplitComparison:
    """Compute the gradients of a batch in two ways, with random draws stilled.

    Parameters are not updated; gradients, buffers, random states and modes are put back.

    Args:
        session: with the plan's other strategies applied, or without any.
        batch: on the session's device.
        split: one way to cut it.
        other: another one.
    """
    with _untouched(session):
        first, stilled = _gradients(session, batch, split)
        second, _ = _gradients(session, batch, other)
    errors = relative_errors(first, second)
    worst = max(errors, key=lambda name: errors[name], default="")
    bound, dtype = max(
        ((_BOUNDS.get(each.dtype, _COARSEST_BOUND), each.dtype) for each in first.values()),
        key=lambda pair: pair[0],
        default=(_BOUNDS[torch.float32], torch.float32),
    )
    return SplitComparison(
        error=errors.get(worst, 0.0),
        worst=worst,
        bound=bound,
        dtype=str(dtype).removeprefix("torch."),
        num_draws=stilled.num_draws,
        unstilled=tuple(sorted(stilled.unstilled)),
    )


def other_split(split: AbstractSplitting, num_samples: int, *, whole: bool) -> AbstractSplitting:
    """Give another way to cut a batch: not at all, or into pieces of half the size.

    Pieces of one sample are held against pieces of two.
    """
    half = max(1, split.micro_batch_size // 2)
    other = half if half < split.micro_batch_size else 2
    size = num_samples if whole else other
    settings = {**split.settings(), "micro_batch_size": size}
    return type(split)(**settings)


def _gradients(
    session: Session, batch: Any, split: AbstractSplitting
) -> tuple[dict[str, torch.Tensor], StilledRandomness]:
    """Give the gradients of one way to cut a batch."""
    buffers = [(buffer, buffer.clone()) for buffer in session.model.buffers()]
    for parameter in session.model.parameters():
        parameter.grad = None
    undo = split.apply(session)
    stilled = StilledRandomness()
    try:
        with untouched_randomness(), stilled, torch.enable_grad():
            torch.manual_seed(0)
            session.gradient_pass(session, batch, lambda _: None)
    finally:
        undo()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    gradients = {
        name: parameter.grad.detach().clone()
        for name, parameter in session.model.named_parameters()
        if parameter.grad is not None
    }
    return gradients, stilled


@contextmanager
def _untouched(session: Session) -> Iterator[None]:
    """Put back what two gradient passes change of the session."""
    parameters = [*session.model.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    size, counted = session.micro_batch_size, session.num_counted
    try:
        yield
    finally:
        session.micro_batch_size, session.num_counted = size, counted
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
