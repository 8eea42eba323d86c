"""What planning found: the plan to run, and everything that lies around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    was_interrupted: bool = False
    """Whether it was over because the user wanted an end."""

    def unless_interrupted(self) -> Self:
        """Return the plan to train under.

        Raises:
            KeyboardInterrupt: if planning was interrupted: that is to end the training as well.
        """
        if self.was_interrupted:
            raise KeyboardInterrupt
        return self


def over_budget(num_bytes: int) -> str:
    """Say how far a plan is over the budget."""
    return f"{format_bytes(num_bytes)} over the budget"
