"""Enforces a budget on the script, from the moment torch has been imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfit.observe.enforced_budget import BudgetExceededError, EnforcedBudget
from memfit.observe.peaks import Peaks, StepReading


class WatchedBudget(EnforcedBudget):
    """Tell somebody of every operator that is stopped, also where the script catches the error."""

    def __init__(
        self, budget_bytes: int, on_exceeded: Callable[[BudgetExceededError], object]
    ) -> None:
        super().__init__(budget_bytes)
        self.is_off = False
        self._on_exceeded = on_exceeded
        self._most_bytes = 0

    @property
    def most_bytes(self) -> int:
        """Return the most that was ever alive at once."""
        return max(self._most_bytes, self.highest_bytes)

    def begin_anew(self) -> int:
        """Return the highest count since this was last called."""
        highest_bytes = self.highest_bytes
        self._most_bytes = self.most_bytes
        self.highest_bytes = self.live_bytes
        return highest_bytes

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.is_off:
            return func(*args, **kwargs)
        try:
            return super()._dispatch(func, args, kwargs)
        except BudgetExceededError as error:
            self._on_exceeded(error)
            raise


class BudgetPeaks(Peaks):
    """Read what an enforced budget has counted."""

    def __init__(self, budget: WatchedBudget) -> None:
        self._budget = budget

    def end(self) -> StepReading:
        """Take the highest count, and let it begin anew."""
        return StepReading(measured_peak_bytes=self._budget.begin_anew())


def limit_cards(budget_bytes: int) -> None:
    """Have every visible card refuse more than a budget, once the script first uses one.

    Uses torch's own list of what waits for that moment, so that a script that forks before it
    uses a card still may.
    """

    def limit() -> None:
        for index in range(torch.cuda.device_count()):
            total_bytes = torch.cuda.get_device_properties(index).total_memory
            fraction = min(1.0, budget_bytes / total_bytes)
            torch.cuda.set_per_process_memory_fraction(fraction, index)

    # Not asked for a card first: that starts CUDA's driver, which does not outlive a fork.
    torch.cuda._lazy_call(limit)
