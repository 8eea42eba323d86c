"""A run that went above its budget does not end as if it had kept it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import MemfitError
from memfit.units import format_bytes


class PeakAboveBudgetError(MemfitError):
    """Say that a training has taken more than it was to take, with the figures."""

    exit_code = 3

    def __init__(self, budget_bytes: int, result: Mapping[str, Any]) -> None:
        measured_bytes = result["measured_peak_bytes"]
        super().__init__(
            f"The measured peak of {format_bytes(measured_bytes)} is "
            f"{format_bytes(measured_bytes - budget_bytes)} above the budget of "
            f"{format_bytes(budget_bytes)}; predicted were "
            f"{format_bytes(result['predicted_peak_bytes'])}. The run is whole in "
            f"{result['run_folder']}; give a smaller budget to plan with more room."
        )


def check_peak(result: Mapping[str, Any]) -> None:
    """Refuse to call a run done whose tensors took more than its whole budget.

    Raises:
        PeakAboveBudgetError: if they did.
    """
    budget_bytes, measured_bytes = result["budget_bytes"], result["measured_peak_bytes"]
    if None not in (budget_bytes, measured_bytes) and measured_bytes > budget_bytes:
        raise PeakAboveBudgetError(budget_bytes, result)
