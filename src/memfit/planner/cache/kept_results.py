"""Whole results of planning that are kept: the same question needs neither the job nor a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.figures import EarlierPlan
from memfit.planner.cache.recording_cache import RecordingCache

if TYPE_CHECKING:
    from memfit.planner.result.planning_result import PlanningResult
    from memfit.strategies.plan import Plan

_MOST_RESULTS = 32
"""Of one question under different budgets; the oldest goes first."""
_INTERRUPTED = (
    "The search was interrupted before it had found a plan: this is one that an earlier call has "
    "found, and faster ones may fit."
)


class KeptResults:
    """What was found for one question about a job, under different budgets.

    Torch is imported only where there is something to return.

    Args:
        cache: of the job on its device.
        question: all that was asked but the budget.
    """

    def __init__(self, cache: RecordingCache, question: object) -> None:
        self._cache = cache
        self._question = question

    def find(self, budget_bytes: int | None) -> PlanningResult | None:
        """Return what planning has found for the same budget; None if it has to be looked for."""
        return self._get(budget_bytes) if budget_bytes in self._known() else None

    def keep(self, budget_bytes: int | None, result: PlanningResult) -> None:
        """Keep what was found for a budget, if planning came to its end."""
        if result.ended_early or result.prediction is None or budget_bytes in self._known():
            return
        self._cache.put(result, *self._name(budget_bytes))
        known = {**self._known(), budget_bytes: tuple(map(_figures, _plans(result)))}
        newest = dict([*known.items()][-_MOST_RESULTS:])
        self._cache.put(newest, "results", self._question)

    def fastest_fitting(self, budget_bytes: int | None) -> EarlierPlan | None:
        """Return the fastest of all plans that were given and fit a budget, chosen or in reserve.

        A search may find a faster one.
        """
        found = self._fastest(budget_bytes)
        return None if found is None else found[1]

    def fallback(self, budget_bytes: int | None) -> PlanningResult | None:
        """Return the same plan, to be used where the search has come to nothing."""
        found = self._fastest(budget_bytes)
        result = None if found is None else self._get(found[0])
        if found is None or result is None:
            return None
        plan = next(each for each in _plans(result) if _figures(each) == found[1])
        prediction = plan.prediction
        assert prediction is not None, "every plan that is given has one"
        return replace(
            result,
            strategies=plan.strategies,
            numerics=plan.numerics,
            proof=plan.proof,
            reasons=plan.reasons,
            prediction=replace(prediction, budget_bytes=budget_bytes, fits=True),
            considered=(),
            pareto=(),
            approximations=(),
            ladder=(),
            notes=[_INTERRUPTED],
            ended_early=True,
        )

    def _fastest(self, budget_bytes: int | None) -> tuple[int | None, EarlierPlan] | None:
        """Return the fastest plan that fits a budget, with the budget that it was found for."""
        if budget_bytes is None:
            return None
        fitting = (
            (budget, plan)
            for budget, plans in self._known().items()
            for plan in plans
            if plan.peak_bytes <= budget_bytes
        )
        return min(fitting, key=lambda each: _cost(each[1]), default=None)

    def _known(self) -> dict[int | None, tuple[EarlierPlan, ...]]:
        """Return the plans of each result by budget: the chosen one, and those in reserve."""
        found = self._cache.get("results", self._question)
        return found if isinstance(found, dict) else {}

    def _get(self, budget_bytes: int | None) -> PlanningResult | None:
        found: PlanningResult | None = self._cache.get(*self._name(budget_bytes))
        return found

    def _name(self, budget_bytes: int | None) -> tuple[object, ...]:
        return "result", self._question, budget_bytes


def _plans(result: PlanningResult) -> Iterator[Plan]:
    """Yield the plans that a result gives, each with its prediction."""
    yield from (each for each in (result, *result.ladder) if each.prediction is not None)


def _figures(plan: Plan) -> EarlierPlan:
    prediction = plan.prediction
    assert prediction is not None, "asked of those that have one"
    return EarlierPlan(
        strategies=tuple(plan.labels()),
        peak_bytes=prediction.bounded_bytes(),
        step_seconds=prediction.step_seconds,
    )


def _cost(plan: EarlierPlan) -> tuple[float, int]:
    return plan.step_seconds, plan.peak_bytes
