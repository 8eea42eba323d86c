"""Made-up predictions."""

from __future__ import annotations

from typing import Any

from memfit.figures import Certainty, Prediction


def make_prediction(peak_bytes: int, **changes: Any) -> Prediction:
    """Return the prediction of an exact plain step on the CPU, all of whose peaks are the same."""
    known = {
        "device": "cpu",
        "batch_size": 4,
        "peak_allocated_bytes": peak_bytes,
        "peak_reserved_bytes": peak_bytes,
        "process_bytes": peak_bytes,
        "first_step_peak_bytes": peak_bytes,
        "step_seconds": 1.0,
        "by_category": {"saved activations": peak_bytes},
        "by_module": {},
        "strategies": (),
        "numerics": "exact",
        "certainty": Certainty.EXACT,
    }
    return Prediction(**{**known, **changes})
