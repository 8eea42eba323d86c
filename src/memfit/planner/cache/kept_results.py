"""Whole results of planning that are kept: the same question needs neither the job nor a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.planner.cache.recording_cache import RecordingCache

if TYPE_CHECKING:
    from memfit.planner.result.planning_result import PlanningResult

_MOST_RESULTS = 32
"""Of one question under different budgets; the oldest goes first."""


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
        """Return what planning would find for a budget; None if that has to be looked for.

        What was found for a larger budget counts where it fits this one as well: everything that
        fits here did fit there, and nothing there was faster.
        """
        found: PlanningResult | None
        known = self._known()
        if budget_bytes in known:
            found = self._get(budget_bytes)
            if found is not None:
                return found
        if budget_bytes is None:
            return None
        larger = (each for each in known if each is not None and each >= budget_bytes)
        for each in sorted(larger):
            if known[each] <= budget_bytes:
                found = self._get(each)
                return None if found is None else found.under_smaller_budget(budget_bytes)
        return None

    def keep(self, budget_bytes: int | None, result: PlanningResult) -> None:
        """Keep what was found for a budget, if planning came to its end."""
        prediction = result.prediction
        if result.ended_early or prediction is None or budget_bytes in self._known():
            return
        self._cache.put(result, *self._name(budget_bytes))
        known = {**self._known(), budget_bytes: prediction.bounded_bytes()}
        newest = dict([*known.items()][-_MOST_RESULTS:])
        self._cache.put(newest, "results", self._question)

    def _known(self) -> dict[int | None, int]:
        """Return the peaks of what was found, by budget."""
        found = self._cache.get("results", self._question)
        return found if isinstance(found, dict) else {}

    def _get(self, budget_bytes: int | None) -> PlanningResult | None:
        found: PlanningResult | None = self._cache.get(*self._name(budget_bytes))
        return found

    def _name(self, budget_bytes: int | None) -> tuple[object, ...]:
        return "result", self._question, budget_bytes
