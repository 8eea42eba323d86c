"""Keeps the plan that a run has found in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.runtime.planned_steps import PlannedSteps
from memfit.strategies.plan import Plan


class FoundPlan:
    """Save the plan in force beside the one that the run began with, and go on with it."""

    def __init__(self, steps: PlannedSteps) -> None:
        self._steps = steps
        self._began_with = steps.plan.to_json()["strategies"]

    def state_dict(self) -> dict[str, Any]:
        """Return both plans as plain values."""
        plan = self._steps.plan.to_json()
        return {
            "began_with": self._began_with,
            "found": {**plan, "prediction": None},
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on with a saved plan if its run began with the same one as this run.

        Raises:
            StrategyError: if the plan cannot apply any more.
        """
        if state is None or state["began_with"] != self._began_with:
            return
        if state["found"]["strategies"] == self._steps.plan.to_json()["strategies"]:
            return
        self._steps.change_plan(Plan.from_json(state["found"]))
