"""Says why a plan was chosen and the others were not."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.figures import ConsideredPlan
from memfit.planner.search import Candidate
from memfit.units import format_bytes, format_seconds


def considered_plans(tried: Iterable[Candidate], best: Candidate) -> tuple[ConsideredPlan, ...]:
    """List every plan that was recorded, the chosen one first, then by time."""
    ordered = sorted(tried, key=lambda candidate: (candidate is not best, candidate.cost))
    return tuple(
        ConsideredPlan(
            strategies=tuple(strategy.label() for strategy in candidate.strategies),
            numerics=candidate.prediction.numerics,
            peak_bytes=candidate.prediction.bounded_bytes(),
            step_seconds=candidate.prediction.step_seconds,
            fits=bool(candidate.prediction.fits),
            chosen=candidate is best,
            reason=_reason(candidate, best),
        )
        for candidate in ordered
    )


def _reason(candidate: Candidate, best: Candidate) -> str:
    """Say in a few words what became of a plan."""
    if candidate is best:
        return "the fastest that fits"
    prediction = candidate.prediction
    budget_bytes = prediction.budget_bytes or 0
    if not prediction.fits:
        return f"{format_bytes(prediction.bounded_bytes() - budget_bytes)} over the budget"
    slower_seconds = prediction.step_seconds - best.prediction.step_seconds
    if slower_seconds > 0:
        return f"slower by {format_seconds(slower_seconds)} a step"
    return "as fast, but no smaller or simpler"
