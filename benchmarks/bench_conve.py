"""The run of ``make run``: ConvE on UMLS in three quarters of the memory it would take.

Run: python benchmarks/bench_conve.py        (about a minute on two quiet cores)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time

from results_file import save_result

FLAGS = (
    "--dataset umls --budget-fraction 0.75 --batch-size 256 --learning-rate 0.005 "
    "--learning-rate-decay 0.98 --output-channels 16 --input-dropout 0.1 "
    "--feature-map-dropout 0.1 --output-dropout 0.2 --num-epochs 70 --eval-every 10 "
    "--checkpoint-frequency 10"
)
_COMMAND = (sys.executable, "-m", "memfit", "train", "conve")


def main() -> None:
    """Train in a fresh process and keep what it reports."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*_COMMAND, *FLAGS.split(), "--output-dir", f"{folder}/run", "--json"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    result = json.loads(done.stdout)
    measured, predicted = result["measured_peak_bytes"], result["predicted_peak_bytes"]
    save_result(
        "conve",
        {
            "flags": FLAGS,
            "whole_process_seconds": round(time.perf_counter() - started, 1),
            "plain_peak_bytes": result["plain_peak_bytes"],
            "budget_bytes": result["budget_bytes"],
            "predicted_peak_bytes": predicted,
            "plain_step_seconds": result["plain_step_seconds"],
            "predicted_step_seconds": result["predicted_step_seconds"],
            "measured_peak_bytes": measured,
            "error_fraction": predicted / measured - 1,
            "strategies": result["strategies"],
            "numerics": result["numerics"],
            "test": result["test"]["both"],
        },
    )


if __name__ == "__main__":
    main()
