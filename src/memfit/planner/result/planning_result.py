"""What planning found: the plan to run, and everything that lies around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from memfit.figures import (
    Approximation,
    ConsideredPlacement,
    ConsideredPlan,
    ParetoPoint,
    Refusal,
    Remedy,
)
from memfit.strategies.plan import Plan
from memfit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult(Plan):
    """The plan that was chosen, with what the search learned on its way.

    It is a plan itself, so it can be run, verified and saved; a file keeps the plan alone.
    """

    considered: Sequence[ConsideredPlan] = ()
    """Every plan that was recorded, the chosen one first."""
    pareto: Sequence[ParetoPoint] = ()
    """The trade of memory against time around the plan, fastest first."""
    approximations: Sequence[Approximation] = ()
    """What the plan would take with one strategy more, each of a kind that was not allowed."""
    remedies: Sequence[Remedy] = ()
    """What each strategy of the catalogue could remove at most, largest first."""
    notes: Sequence[str] = ()
    """What could not be found out."""
    placements: Sequence[ConsideredPlacement] = ()
    """Every way to share the step among ranks that was planned, where ranks were asked for."""
    refused: Sequence[Refusal] = ()
    """Strategies that were left out of the search."""
    ended_early: bool = False
    """Whether something faster may have been left out because the time was over."""

    def under_smaller_budget(self, budget_bytes: int) -> Self:
        """Return what planning would have found for a smaller budget that the plan fits as well.

        Fewer plans fit such a budget, so the fastest of them is still this one.

        Raises:
            ValueError: if the plan does not fit it.
        """
        prediction = self.prediction
        if prediction is None or prediction.bounded_bytes() > budget_bytes:
            msg = f"the plan does not fit a budget of {format_bytes(budget_bytes)}"
            raise ValueError(msg)
        return replace(
            self,
            prediction=replace(prediction, budget_bytes=budget_bytes),
            ladder=tuple(_under(rung, budget_bytes) for rung in self.ladder),
            considered=[_judged(each, budget_bytes) for each in self.considered],
        )


def over_budget(num_bytes: int) -> str:
    """Say how far a plan is over the budget."""
    return f"{format_bytes(num_bytes)} over the budget"


def _under(rung: Plan, budget_bytes: int) -> Plan:
    """Return a plan that takes less than the chosen one, with the budget that it is under."""
    prediction = rung.prediction
    if prediction is None:
        return rung
    return rung.with_prediction(replace(prediction, budget_bytes=budget_bytes))


def _judged(considered: ConsideredPlan, budget_bytes: int) -> ConsideredPlan:
    """Say of a plan whether it fits a smaller budget."""
    if considered.peak_bytes <= budget_bytes:
        return considered
    reason = over_budget(considered.peak_bytes - budget_bytes)
    return replace(considered, fits=False, reason=reason)
