"""The plans around a choice as points: what each takes, why it was not chosen, what more buys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from memfit.figures import ConsideredPlan, ParetoPoint
from memfit.planner.result.front import pareto
from memfit.units import MIB, format_bytes, format_seconds

from .plan_rows import point_of
from .wording import brief_plan, plan_name

_MOST_POINTS = 150
_LONGEST_SETTINGS = 2000
"""Longer ones are shown of the chosen plan alone: those of a hundred plans would be megabytes."""
_ESTIMATED = "Not recorded: both figures are estimates."
_FASTEST = "No larger plan is known to be faster."


class PointKind(StrEnum):
    """Say what a point of the picture is."""

    CHOSEN = "chosen"
    PLAIN = "plain"
    RECORDED = "recorded"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """One plan, as it is drawn and as it is written about."""

    kind: PointKind
    strategies: tuple[str, ...]
    numerics: str
    """Empty where the plan was not recorded."""
    peak_bytes: int
    step_seconds: float
    fits: bool
    reason: str
    """Why it was chosen or not."""
    more: str
    """What more memory would buy, or which plan is better in both figures."""

    @property
    def role(self) -> str:
        """Return what it is called: of plans that are all too large, the smallest is chosen."""
        is_smallest = self.kind is PointKind.CHOSEN and not self.fits
        return "smallest" if is_smallest else self.kind.value

    @property
    def name(self) -> str:
        """Return its strategies with their settings, long lists counted."""
        return brief_plan(self.strategies)

    @property
    def brief_name(self) -> str:
        """Return its strategies without their settings."""
        return plan_name(list(dict.fromkeys(each.partition("(")[0] for each in self.strategies)))

    @property
    def settings(self) -> str:
        """Return its strategies with every setting; empty where that adds nothing."""
        found = plan_name(self.strategies)
        is_short = self.kind is PointKind.CHOSEN or len(found) <= _LONGEST_SETTINGS
        return found if is_short and found != self.name else ""

    @property
    def is_recorded(self) -> bool:
        """Return whether its figures come from recording the step so."""
        return self.kind is not PointKind.ESTIMATED


def plan_points(
    considered: Sequence[ConsideredPlan],
    estimated: Iterable[ParetoPoint] = (),
    *,
    budget_bytes: int | None = None,
) -> tuple[PlanPoint, ...]:
    """Return the plans that were recorded, and estimates, fastest first.

    Of very many, the chosen one, the plain step and those that nothing beats stay.
    """
    recorded = [point_of(row) for row in considered]
    guesses = [point for point in estimated if not point.is_recorded]
    best = pareto([*recorded, *guesses])
    points = [
        *(_recorded_point(row, best) for row in considered),
        *(_estimated_point(point, best, budget_bytes) for point in guesses),
    ]
    kept = {(each.strategies, each.is_recorded) for each in best}

    def rank(point: PlanPoint) -> tuple[bool, float]:
        is_named = point.kind in (PointKind.CHOSEN, PointKind.PLAIN)
        known = (point.strategies, point.is_recorded) in kept
        return not (is_named or known), point.step_seconds

    shown = sorted(points, key=rank)[:_MOST_POINTS]
    return tuple(sorted(shown, key=lambda point: (point.step_seconds, point.peak_bytes)))


def _recorded_point(row: ConsideredPlan, best: Sequence[ParetoPoint]) -> PlanPoint:
    plain = PointKind.RECORDED if row.strategies else PointKind.PLAIN
    return PlanPoint(
        kind=PointKind.CHOSEN if row.chosen else plain,
        strategies=row.strategies,
        numerics=row.numerics,
        peak_bytes=row.peak_bytes,
        step_seconds=row.step_seconds,
        fits=row.fits,
        reason=row.reason,
        more=_more(point_of(row), best),
    )


def _estimated_point(
    point: ParetoPoint, best: Sequence[ParetoPoint], budget_bytes: int | None
) -> PlanPoint:
    over = point.peak_bytes - budget_bytes if budget_bytes else 0
    reason = f"{format_bytes(over)} over the budget. {_ESTIMATED}" if over > 0 else _ESTIMATED
    return PlanPoint(
        kind=PointKind.ESTIMATED,
        strategies=point.strategies,
        numerics="",
        peak_bytes=point.peak_bytes,
        step_seconds=point.step_seconds,
        fits=over <= 0,
        reason=reason,
        more=_more(point, best),
    )


def _more(point: ParetoPoint, best: Sequence[ParetoPoint]) -> str:
    """Write what the next larger plan would save for each MiB that it takes more."""
    faster = [each for each in best if each.step_seconds < point.step_seconds]
    better = [each for each in faster if each.peak_bytes <= point.peak_bytes]
    if better:
        found = min(better, key=lambda each: each.step_seconds)
        return (
            f"In no more memory, {brief_plan(found.strategies)} takes "
            f"{format_seconds(found.step_seconds)}."
        )
    if not faster:
        return _FASTEST
    found = min(faster, key=lambda each: each.peak_bytes)
    more_bytes = found.peak_bytes - point.peak_bytes
    saved_seconds = point.step_seconds - found.step_seconds
    slope_seconds = saved_seconds / (more_bytes / MIB)
    return (
        f"{format_bytes(more_bytes)} more buys {brief_plan(found.strategies)}: "
        f"{format_seconds(saved_seconds)} less a step, or {format_seconds(slope_seconds)} for "
        "each MiB."
    )
