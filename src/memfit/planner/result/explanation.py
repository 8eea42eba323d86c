"""Says why a plan was chosen and the others were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from memfit.allocator.simulate import AllocatorRules, alive_at_peak
from memfit.figures import ConsideredPlan, Refusal, Remedy
from memfit.planner.result.planning_result import over_budget
from memfit.planner.search.candidates import Candidate, Strategies
from memfit.planner.search.options import SearchSpace
from memfit.strategies import CATALOGUE
from memfit.strategies.base import Strategy
from memfit.trace.events import Category, Phase, Trace
from memfit.units import format_seconds

Held = Mapping[tuple[Category, Phase], int]
"""The bytes that live at a step's peak, by what they are for and by the part that made them."""


def considered_plans(tried: Iterable[Candidate], best: Candidate) -> tuple[ConsideredPlan, ...]:
    """List every plan that was recorded, the chosen one first, then by time."""
    ordered = sorted(
        tried, key=lambda candidate: (candidate.strategies != best.strategies, candidate.cost)
    )
    return tuple(
        ConsideredPlan(
            strategies=tuple(strategy.label() for strategy in candidate.strategies),
            numerics=candidate.prediction.numerics,
            peak_bytes=candidate.peak_bytes,
            step_seconds=candidate.prediction.step_seconds,
            fits=bool(candidate.prediction.fits),
            chosen=candidate.strategies == best.strategies,
            reason=_reason(candidate, best),
        )
        for candidate in ordered
    )


def held_at_peak(trace: Trace, rules: AllocatorRules) -> Held:
    """Sort what lives at a step's peak."""
    held: Counter[tuple[Category, Phase]] = Counter()
    for index, num_bytes in alive_at_peak(trace, rules):
        allocation = trace.allocations[index]
        held[allocation.category, allocation.phase] += num_bytes
    return held


def remedies(
    held: Held, removed: Mapping[str, int], chosen: Sequence[Strategy], refused: Sequence[Refusal]
) -> tuple[Remedy, ...]:
    """Get what each strategy can take off the plain step's peak allocated at most, the most first.

    One that acts on nothing that lives there, but on what the allocator keeps unused, has no place.

    Args:
        held: what lives at that peak.
        removed: what strategies were seen to take off it, by name.
        chosen: the strategies of the chosen plan.
        refused: why others were left out.
    """
    used = {strategy.name for strategy in chosen}
    reasons = {refusal.strategy: refusal.sentence for refusal in refused}
    found = [
        Remedy(
            strategy=strategy.name,
            most_bytes=removed.get(strategy.name, _most_bytes(strategy, held)),
            is_recorded=strategy.name in removed,
            state="used" if strategy.name in used else reasons.get(strategy.name, "not needed"),
        )
        for strategy in CATALOGUE
        if strategy.acts_on
    ]
    return tuple(sorted(found, key=lambda remedy: (-remedy.most_bytes, remedy.strategy)))


def removed_alone(tried: Mapping[Strategies, Candidate], space: SearchSpace) -> dict[str, int]:
    """Return what strategies take off the plain peak, where each setting was recorded alone."""
    if () not in tried:
        return {}
    plain_bytes = tried[()].prediction.peak_allocated_bytes
    found: dict[str, int] = {}
    for options in (*space.options, space.splits):
        settings = [option for option in options if option is not None]
        alone = [tried[setting,] for setting in settings if (setting,) in tried]
        if alone and len(alone) == len(settings):
            least_bytes = min(candidate.prediction.peak_allocated_bytes for candidate in alone)
            found[settings[0].name] = max(0, plain_bytes - least_bytes)
    return found


def _most_bytes(strategy: type[Strategy], held: Held) -> int:
    """Bound what a strategy can take off a peak.

    At that moment it removes no more than what lies there of the kinds that it acts on; another
    moment may then become the peak.
    """
    return sum(
        int(num_bytes * strategy.acts_on.get(category, 0.0))
        for (category, phase), num_bytes in held.items()
        if category is not Category.TEMPORARIES or phase in strategy.acts_in
    )


def _reason(candidate: Candidate, best: Candidate) -> str:
    """Say in a few words what became of a plan."""
    if candidate.strategies == best.strategies:
        is_too_large = best.prediction.fits is False
        return "the smallest that was reached" if is_too_large else "the fastest that fits"
    prediction = candidate.prediction
    budget_bytes = prediction.budget_bytes or 0
    if not prediction.fits:
        return over_budget(candidate.peak_bytes - budget_bytes)
    slower_seconds = prediction.step_seconds - best.prediction.step_seconds
    if slower_seconds > 0:
        return f"slower by {format_seconds(slower_seconds)} a step"
    return "about as fast, and not sought further"
