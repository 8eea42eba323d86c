"""What of a plan is worth showing: the rows of its tables, found before anything is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memfit.figures import ConsideredPlan, ParetoPoint, Prediction
from memfit.planner.result.front import pareto
from memfit.units import GIB, format_bytes

if TYPE_CHECKING:  # they need torch, which the page of a run does not
    from memfit.planner.result.planning_result import PlanningResult
    from memfit.strategies.plan import Plan

_NUM_OVER = 3
_NUM_FITTING = 3
_NUM_POINTS = 10
_WORTH_ASKING = 0.2
"""What could take off less than this share of the largest peak is not asked for."""
_OPEN = ("used", "not needed")
"""States of remedies that nothing speaks against."""
_WORTH_TELLING = 0.01
"""A larger budget that makes a step faster by less than this share is not worth a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsideredRows:
    """The considered plans that tell most, and how many others there are."""

    rows: tuple[ConsideredPlan, ...]
    num_more: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LargerBudget:
    """What a step would take if there were more memory."""

    budget_bytes: int
    more: str
    """How much more than the budget, in words."""
    point: ParetoPoint
    chosen: ParetoPoint

    @property
    def saved_fraction(self) -> float:
        """Return the part of the chosen plan's seconds that it would save."""
        return 1 - self.point.step_seconds / self.chosen.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyRow:
    """What a strategy could take off the peak at most, and what became of it."""

    strategy: str
    most_bytes: int
    known: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRemedy:
    """Strategies that were left out for a reason, and what they could have taken off the peak."""

    names: str
    most_bytes: int
    sentence: str


def considered_rows(considered: Sequence[ConsideredPlan]) -> ConsideredRows:
    """Choose the chosen plan, the plain step, the fastest that are too large and the next that fit.

    Of those that are too large, only what no other of them beats in both time and peak.
    """
    ordered = sorted(considered, key=lambda row: (row.step_seconds, row.peak_bytes))
    too_large: list[ConsideredPlan] = []
    for row in ordered:
        if not row.fits and all(row.peak_bytes < faster.peak_bytes for faster in too_large):
            too_large.append(row)
    fitting = [row for row in ordered if row.fits and not row.chosen]
    telling = [*too_large[:_NUM_OVER], *fitting[:_NUM_FITTING]]
    rows = [row for row in considered if row.chosen or not row.strategies or row in telling]
    return ConsideredRows(rows=tuple(rows), num_more=len(considered) - len(rows))


def plain_row(considered: Iterable[ConsideredPlan]) -> ConsideredPlan | None:
    """Find the plain step; None where every plan had to have some strategy."""
    return next((row for row in considered if not row.strategies), None)


def chosen_row(considered: Iterable[ConsideredPlan]) -> ConsideredPlan | None:
    """Find the chosen plan; None where nothing was chosen from."""
    return next((row for row in considered if row.chosen), None)


def is_measured(plan: PlanningResult) -> bool:
    """Tell if the chosen plan's time was taken by running it; all other times are estimates."""
    row = chosen_row(plan.considered)
    return row is not None and row.step_seconds != predicted(plan).step_seconds


def with_chosen_time(plan: PlanningResult) -> tuple[ConsideredPlan, ...]:
    """Return the considered plans, the chosen one with the time that it was chosen for."""
    seconds = predicted(plan).step_seconds
    return tuple(
        replace(row, step_seconds=seconds) if row.chosen else row for row in plan.considered
    )


def predicted(plan: Plan) -> Prediction:
    """Return the prediction that the planner made."""
    assert plan.prediction is not None, "the planner predicts what it plans"
    return plan.prediction


def curve(plan: PlanningResult) -> tuple[ParetoPoint, ...]:
    """Return the trade of memory against time, fastest first: what was recorded, and estimates.

    The search looked for anything that fits and is faster than the chosen plan. What still seems
    to be is refuted by something better known, or not worth telling apart, and stays out.
    """
    chosen = chosen_row(plan.considered)
    if chosen is None:
        return ()
    budget_bytes = predicted(plan).budget_bytes or 0
    others = [point_of(row) for row in plan.considered if not row.chosen]
    others += [point for point in plan.pareto if not point.is_recorded]
    plausible = (
        point
        for point in others
        if point.peak_bytes > budget_bytes or point.step_seconds > chosen.step_seconds
    )
    return pareto([point_of(chosen), *plausible])


def point_of(row: ConsideredPlan) -> ParetoPoint:
    """Return what a recorded plan is among all points."""
    return ParetoPoint(
        strategies=row.strategies,
        peak_bytes=row.peak_bytes,
        step_seconds=row.step_seconds,
        is_recorded=True,
        is_chosen=row.chosen,
    )


def spread_out(
    points: Sequence[ParetoPoint], num_points: int = _NUM_POINTS
) -> tuple[ParetoPoint, ...]:
    """Keep at most so many points, evenly spaced in bytes, with both ends and the chosen one."""
    if len(points) <= num_points:
        return tuple(points)
    peaks = [point.peak_bytes for point in points]
    low_bytes, high_bytes = min(peaks), max(peaks)
    step_bytes = (high_bytes - low_bytes) / (num_points - 2)  # one place is for the chosen plan
    wanted = [low_bytes + step_bytes * place for place in range(num_points - 1)]
    kept = {
        min(range(len(points)), key=lambda index: abs(peaks[index] - num_bytes))
        for num_bytes in wanted
    }
    kept |= {index for index, point in enumerate(points) if point.is_chosen}
    return tuple(points[index] for index in sorted(kept))


def larger_budgets(points: Sequence[ParetoPoint], budget_bytes: int) -> tuple[LargerBudget, ...]:
    """Get what a tenth more and a GiB more would buy, of what was recorded and is worth telling."""
    chosen = next((point for point in points if point.is_chosen), None)
    if chosen is None:
        return ()
    found: dict[ParetoPoint, LargerBudget] = {}
    for more_bytes, more in sorted([(budget_bytes // 10, "10 %"), (GIB, format_bytes(GIB))]):
        larger_bytes = budget_bytes + more_bytes
        fitting = [p for p in points if p.is_recorded and p.peak_bytes <= larger_bytes]
        best = min(fitting, key=lambda point: point.step_seconds, default=chosen)
        larger = LargerBudget(budget_bytes=larger_bytes, more=more, point=best, chosen=chosen)
        if larger.saved_fraction >= _WORTH_TELLING:
            found.setdefault(best, larger)
    return tuple(found.values())


def remedy_rows(plan: PlanningResult) -> tuple[RemedyRow, ...]:
    """List what was used, could have been, or would be with another option of the command.

    What is not used and takes nothing off the peak is left out.
    """
    rows = []
    options = {refusal.strategy: refusal.option for refusal in plan.refused}
    for remedy in plan.remedies:
        option = options.get(remedy.strategy, "")
        is_open = remedy.state in _OPEN
        is_worth_telling = remedy.most_bytes > 0 or remedy.state == "used"
        if is_worth_telling and (is_open or option):
            asked = option.removesuffix(f" {remedy.strategy}")
            rows.append(
                RemedyRow(
                    strategy=remedy.strategy,
                    most_bytes=remedy.most_bytes,
                    known="recorded" if remedy.is_recorded else "at most",
                    state=remedy.state if is_open else f"only with {asked}",
                )
            )
    return tuple(rows)


def refusals(plan: PlanningResult) -> dict[str, list[str]]:
    """Return the strategies that no option of the command would admit, by the reason.

    Those come first that could have taken most off the peak.
    """
    found: dict[str, list[str]] = {}
    for refusal in plan.refused:
        if not refusal.option:
            found.setdefault(refusal.sentence, []).append(refusal.strategy)
    most = _most_bytes(plan)
    ordered = sorted(found, key=lambda sentence: -max(most.get(n, 0) for n in found[sentence]))
    return {sentence: found[sentence] for sentence in ordered}


def lost_remedies(plan: PlanningResult) -> tuple[LostRemedy, ...]:
    """List ways to cut the batch that could take a good part off the peak and were left out.

    None where the batch is cut, or could be. What keeps a loss from being cut is for the job's
    owner to change, as by ``memfit.Total``.
    """
    from memfit.strategies import CATALOGUE  # they need torch, which the page of a run does not
    from memfit.strategies.base import AbstractSplitting

    cutting = {each.name for each in CATALOGUE if issubclass(each, AbstractSplitting)}
    could_cut = any(each.strategy in cutting and each.state in _OPEN for each in plan.remedies)
    if plan.splitting is not None or could_cut:
        return ()
    most = _most_bytes(plan)
    whole_bytes = max((row.peak_bytes for row in plan.considered), default=0)
    lost = (
        LostRemedy(
            names=" and ".join(name for name in names if name in cutting),
            most_bytes=max(most.get(name, 0) for name in names),
            sentence=sentence,
        )
        for sentence, names in refusals(plan).items()
        if cutting.intersection(names)
    )
    return tuple(each for each in lost if each.most_bytes > _WORTH_ASKING * whole_bytes)


def _most_bytes(plan: PlanningResult) -> dict[str, int]:
    return {remedy.strategy: remedy.most_bytes for remedy in plan.remedies}
