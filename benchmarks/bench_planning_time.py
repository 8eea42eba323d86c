"""How long planning takes, beside another checkout of memfit, job by job in turns.

Run: python benchmarks/bench_planning_time.py --beside ../other-checkout        (twenty minutes)

Each job is planned in a process of its own, at two shares of its plain peak, and last a decoder of
8 billion parameters for a GPU that is not there, within that GPU's memory. First come jobs whose
loss couples a batch through encoders, at half their peak, with this checkout alone: what an earlier
one takes for them may have no end. What is compared is the processor time of ``memfit.plan``, which
other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import large_llama
from coupled_encoders import COUPLED
from planner_jobs import planner_jobs
from results_file import commit_of, save_result

import memfit
from memfit.errors import MemfitError

NAME = "planning_time"
_FRACTIONS, _HALF = (0.8, 0.45), 0.5
_LARGE, _LARGE_DEVICE = "large-decoder", "h200"
_HERE = Path(__file__).resolve().parent


def main() -> None:
    """Time all jobs under both checkouts and write the table."""
    parser = argparse.ArgumentParser(description="Compare planning times with another checkout.")
    parser.add_argument("--beside", type=Path, help="the other checkout")
    parser.add_argument("--jobs", nargs="*", help="these alone; nothing is written")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        json.dump(_seconds_of(arguments.one), sys.stdout)
        return
    coupled = {} if arguments.jobs else {name: _seconds_alone(name) for name in COUPLED}
    rows = []
    for name in arguments.jobs or planner_jobs():
        rows += _compared(name, arguments.beside)
    large = [] if arguments.jobs else _compared(_LARGE, arguments.beside)
    ratios = [row["seconds"] / row["other_seconds"] for row in rows]
    summary = {
        "other": commit_of(arguments.beside),
        "total_ratio": sum(r["seconds"] for r in rows) / sum(r["other_seconds"] for r in rows),
        "median_ratio": statistics.median(ratios),
        "worst_ratio": max(ratios),
    }
    print(summary)
    if not arguments.jobs:
        save_result(NAME, {**summary, "rows": rows, "large": large, "coupled": coupled})


def _seconds_alone(name: str) -> float:
    """Plan a job at half its plain peak with this checkout."""
    (seconds,) = _timed(name, _HERE.parent).values()
    print(name, seconds, flush=True)
    return seconds


def _compared(name: str, beside: Path) -> list[dict[str, Any]]:
    """Plan a job under both checkouts; a row for every budget."""
    ours, others = _timed(name, _HERE.parent), _timed(name, beside)
    rows = []
    for fraction, seconds in ours.items():
        row = {"job": name, "fraction": float(fraction), "seconds": seconds}
        rows.append({**row, "other_seconds": others[fraction]})
        print(rows[-1], flush=True)
    return rows


def _timed(name: str, checkout: Path) -> dict[str, float]:
    """Plan a job in a process that imports memfit from a checkout."""
    command = [sys.executable, __file__, "--one", name]
    source = str(checkout.resolve() / "src")
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _seconds_of(name: str) -> dict[str, float]:
    """Plan a job at each share of its plain peak; refusals count as well."""
    warnings.simplefilter("ignore")
    if name == _LARGE:
        begun = time.process_time()
        memfit.plan(large_llama.job, device=_LARGE_DEVICE)
        return {"1.0": time.process_time() - begun}
    job = COUPLED[name] if name in COUPLED else planner_jobs()[name]()
    peak = memfit.predict(job).peak_allocated_bytes
    found = {}
    for fraction in [_HALF] if name in COUPLED else _FRACTIONS:
        begun = time.process_time()
        try:
            memfit.plan(job, budget=int(fraction * peak))
        except MemfitError as error:
            print(error, file=sys.stderr)
        found[str(fraction)] = time.process_time() - begun
    return found


if __name__ == "__main__":
    main()
