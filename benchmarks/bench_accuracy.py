"""Predicted against measured peaks on the CPU, over architectures, optimizers and strategies.

Run: python benchmarks/bench_accuracy.py        (about three minutes on two cores)
Writes benchmarks/results/accuracy.json and its section of docs/accuracy.md.
"""

from __future__ import annotations

import os
import statistics
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from accuracy.report import write_page
from architectures import OPTIMIZERS, architectures
from results_file import save_result

from memfit import Job, Plan, measure
from memfit.errors import StrategyError
from memfit.strategies import build_strategy

SETTINGS = {
    "plain": (),
    "checkpointed": (("activation-checkpointing", {}),),
    "micro-batched": (("micro-batching", {"micro_batch_size": 3}),),
    "bf16": (("bf16", {}),),
}
_THROUGH_BATCH_NORM = (("batchnorm-replay", {"micro_batch_size": 3}),)


def main() -> None:
    """Measure every row, and write the table."""
    warnings.simplefilter("ignore")
    rows = list(_rows())
    scored = [row for row in rows if row["error_fraction"] is not None]
    errors = sorted(abs(row["error_fraction"]) for row in scored)
    figures = {
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "rows": rows,
        "num_rows": len(scored),
        "median_abs_error_fraction": statistics.median(errors),
        "p95_abs_error_fraction": errors[int(0.95 * (len(errors) - 1))],
        "worst_abs_error_fraction": errors[-1],
        "mean_signed_error_fraction": statistics.fmean(row["error_fraction"] for row in scored),
        "num_exact_to_the_byte": sum(error == 0 for error in errors),
    }
    save_result("accuracy", figures)
    write_page()


def _rows() -> Iterator[dict[str, Any]]:
    for architecture, build in architectures().items():
        for optimizer, build_optimizer in OPTIMIZERS.items():
            for setting in SETTINGS:
                yield _row(build(build_optimizer), architecture, optimizer, setting)


def _row(job: Job, architecture: str, optimizer: str, setting: str) -> dict[str, Any]:
    """Measure one combination; a strategy that cannot apply is a row that says so."""
    row: dict[str, Any] = {
        "architecture": architecture,
        "optimizer": optimizer,
        "setting": setting,
        "predicted_bytes": None,
        "measured_bytes": None,
        "error_fraction": None,
        "note": "",
    }
    try:
        measurement = measure(job, _plan(SETTINGS[setting]))
    except StrategyError as refusal:
        if "batchnorm-replay" not in str(refusal):
            return row | {"note": "does not apply: no repeated blocks"}
        measurement = measure(job, _plan(_THROUGH_BATCH_NORM))
        row["note"] = "as batchnorm-replay: the statistics of the whole batch are kept"
    predicted, measured = measurement.predicted_peak_bytes, measurement.peak_allocated_bytes
    assert predicted is not None
    error = predicted / measured - 1
    sys.stderr.write(f"{architecture:9} {optimizer:6} {setting:14} {error:+.4%}\n")
    return row | {
        "predicted_bytes": predicted,
        "measured_bytes": measured,
        "error_fraction": error,
    }


def _plan(settings: Any) -> Plan:
    return Plan(strategies=tuple(build_strategy(name, values) for name, values in settings))


if __name__ == "__main__":
    main()
