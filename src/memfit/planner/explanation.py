"""Says why a plan was chosen and the others were not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.figures import ConsideredPlan, Prediction, Remedy
from memfit.planner.candidates import Candidate
from memfit.strategies import CATALOGUE
from memfit.strategies.base import Strategy
from memfit.units import format_bytes, format_seconds


def considered_plans(tried: Iterable[Candidate], best: Candidate) -> tuple[ConsideredPlan, ...]:
    """List every plan that was recorded, the chosen one first, then by time."""
    ordered = sorted(
        tried, key=lambda candidate: (candidate.strategies != best.strategies, candidate.cost)
    )
    return tuple(
        ConsideredPlan(
            strategies=tuple(strategy.label() for strategy in candidate.strategies),
            numerics=candidate.prediction.numerics,
            peak_bytes=candidate.prediction.bounded_bytes(),
            step_seconds=candidate.prediction.step_seconds,
            fits=bool(candidate.prediction.fits),
            chosen=candidate.strategies == best.strategies,
            reason=_reason(candidate, best),
        )
        for candidate in ordered
    )


def remedies(
    plain: Prediction, chosen: Sequence[Strategy], refused: Sequence[tuple[str, str]]
) -> tuple[Remedy, ...]:
    """Bound what each strategy can take off the plain step's peak, the most first.

    At the moment of the peak no strategy can remove more than what lies there of the kinds that it
    acts on; another moment may then become the peak.
    """
    used = {strategy.name for strategy in chosen}
    reasons = dict(refused)
    found = [
        Remedy(
            strategy=strategy.name,
            most_bytes=sum(plain.by_category.get(kind.value, 0) for kind in strategy.acts_on),
            state="used" if strategy.name in used else reasons.get(strategy.name, "not needed"),
        )
        for strategy in CATALOGUE
    ]
    return tuple(sorted(found, key=lambda remedy: (-remedy.most_bytes, remedy.strategy)))


def _reason(candidate: Candidate, best: Candidate) -> str:
    """Say in a few words what became of a plan."""
    if candidate.strategies == best.strategies:
        return "the fastest that fits"
    prediction = candidate.prediction
    budget_bytes = prediction.budget_bytes or 0
    if not prediction.fits:
        return f"{format_bytes(prediction.bounded_bytes() - budget_bytes)} over the budget"
    slower_seconds = prediction.step_seconds - best.prediction.step_seconds
    if slower_seconds > 0:
        return f"slower by {format_seconds(slower_seconds)} a step"
    return "about as fast, and not sought further"
