"""``--max-gpu-mem``: the measured peak is held against the limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.errors import MemfitError
from memfit.units import format_bytes


class PeakAboveLimitError(MemfitError):
    """Say that a training has taken more than it was to take, with the figures."""

    exit_code = 3

    def __init__(self, limit_bytes: int, result: Mapping[str, Any]) -> None:
        measured_bytes = result["measured_peak_bytes"]
        super().__init__(
            f"The measured peak of {format_bytes(measured_bytes)} is "
            f"{format_bytes(measured_bytes - limit_bytes)} above --max-gpu-mem "
            f"{format_bytes(limit_bytes)}; predicted were "
            f"{format_bytes(result['predicted_peak_bytes'])}. The run is whole in "
            f"{result['run_folder']}; give a lower limit to plan with more room."
        )


def check_peak(result: Mapping[str, Any], limit_bytes: int | None) -> None:
    """Refuse to call a run done that went above its limit.

    Raises:
        PeakAboveLimitError: if it did.
    """
    measured_bytes = result["measured_peak_bytes"]
    if limit_bytes is not None and measured_bytes is not None and measured_bytes > limit_bytes:
        raise PeakAboveLimitError(limit_bytes, result)
