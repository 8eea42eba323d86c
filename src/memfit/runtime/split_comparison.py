"""Computes a real batch's gradients in pieces of several sizes, and says whether they agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.runtime.comparison import relative_errors
from memfit.session.conversion import convert_model, converted, default_dtype
from memfit.session.session import GradientPass, Session
from memfit.session.stilled_randomness import StilledRandomness, untouched_randomness

_BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}
_COARSEST_BOUND = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitComparison:
    """How far gradients of one batch are apart when it is computed in pieces of several sizes."""

    sizes: tuple[int, ...]
    """Samples per piece; the first is what the others are held against."""
    largest_error: float
    """|gradient - reference| / |reference|, the largest over parameters and sizes."""
    worst_parameter: str
    worst_size: int
    effects: tuple[str, ...] = ()
    """What else the pieces leave otherwise."""
    bound: float
    """Up to this error, equal up to rounding."""
    dtype: str
    num_draws: int
    """Random draws that were replaced by fixed values."""
    unstilled: tuple[str, ...]
    """Random draws that were not, so that a difference may be theirs."""

    @property
    def agrees(self) -> bool:
        """Say whether nothing depends on how the batch is split."""
        return self.largest_error <= self.bound and not self.effects


def compare_splits(
    session: Session,
    batch: Any,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    gradient_pass: GradientPass | None = None,
) -> SplitComparison:
    """Compute the gradients of a batch once per size of its pieces, and compare them.

    Random draws are stilled. Nothing is updated; gradients, buffers, random states and types are
    put back.

    Args:
        session: with or without strategies.
        batch: on the session's device; laid out like the job's.
        sizes: samples per piece; the first size is the reference.
        dtype: the type to compute in; None takes the session's own.
        gradient_pass: what computes gradients; None takes the session's.
    """
    compute = gradient_pass or session.gradient_pass
    stilled = StilledRandomness()
    with _untouched(session):
        if dtype is not None:
            convert_model(session.model, dtype)
            batch = converted(batch, dtype)
        with default_dtype(dtype or torch.get_default_dtype()):
            found = [_gradients(session, batch, size, compute, stilled) for size in sizes]
    worst = (0.0, "", sizes[0])
    for size, gradients in zip(sizes[1:], found[1:], strict=True):
        errors = relative_errors(gradients, found[0])
        worst = max(worst, *((error, name, size) for name, error in errors.items()))
    types = {gradient.dtype for gradient in found[0].values()}
    roughest = max(types, key=lambda each: _BOUNDS.get(each, _COARSEST_BOUND))
    return SplitComparison(
        sizes=tuple(sizes),
        largest_error=worst[0],
        worst_parameter=worst[1],
        worst_size=worst[2],
        bound=_BOUNDS.get(roughest, _COARSEST_BOUND),
        dtype=str(roughest).removeprefix("torch."),
        num_draws=stilled.num_draws,
        unstilled=tuple(sorted(stilled.unstilled)),
    )


def _gradients(
    session: Session, batch: Any, size: int, compute: GradientPass, stilled: StilledRandomness
) -> dict[str, torch.Tensor]:
    """Give the gradients of a batch in pieces of one size."""
    buffers = [(buffer, buffer.clone()) for buffer in session.model.buffers()]
    for parameter in session.model.parameters():
        parameter.grad = None
    session.micro_batch_size = size
    try:
        with untouched_randomness(), stilled, torch.enable_grad():
            torch.manual_seed(0)
            compute(session, batch, lambda _: None)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return {
        name: parameter.grad.detach().clone()
        for name, parameter in session.model.named_parameters()
        if parameter.grad is not None
    }


@contextmanager
def _untouched(session: Session) -> Iterator[None]:
    """Put back what gradient passes change of the session."""
    tensors: list[torch.Tensor] = [*session.model.parameters(), *session.model.buffers()]
    before = [(tensor, tensor.data) for tensor in tensors]
    gradients = [tensor.grad for tensor in tensors]
    size, counted = session.micro_batch_size, session.num_counted
    try:
        yield
    finally:
        session.micro_batch_size, session.num_counted = size, counted
        for tensor in tensors:
            tensor.grad = None
        for (tensor, data), gradient in zip(before, gradients, strict=True):
            tensor.data = data
            if gradient is not None:
                tensor.grad = gradient
