"""A run that went above its budget does not end as if it had kept it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import PeakAboveBudgetError


def check_peak(result: Mapping[str, Any]) -> None:
    """Refuse to call a run done whose tensors took more than its whole budget.

    Its final model and all other files stay: the results are right, only the promise of memory is
    broken.

    Raises:
        PeakAboveBudgetError: if they did.
    """
    budget_bytes, measured_bytes = result["budget_bytes"], result["measured_peak_bytes"]
    if None not in (budget_bytes, measured_bytes) and measured_bytes > budget_bytes:
        raise PeakAboveBudgetError(budget_bytes, result)
