"""Predicts every row of the accuracy pages with two checkouts, and compares the bytes.

What moves code and is to change nothing is shown to change nothing.

Run: python benchmarks/same_bytes.py BEFORE [AFTER]     (about 25 minutes on two cores)
BEFORE and AFTER are checkouts with environments alike; AFTER is this one if left out.
Writes benchmarks/results/same_bytes.json and its section of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import write_page
from results_file import commit_of, save_result

_HERE = Path(__file__).parent.parent
_CPU_ROWS = """
import json, sys, warnings
warnings.simplefilter("ignore")
import bench_accuracy as bench
from architectures import OPTIMIZERS, architectures
rows = {}
for architecture, build in architectures().items():
    for optimizer, build_optimizer in OPTIMIZERS.items():
        for setting in bench.SETTINGS:
            try:
                row = bench._row(build(build_optimizer), architecture, optimizer, setting)
                figures = {name: row[name] for name in ("predicted_bytes", "measured_bytes")}
            except Exception as error:
                figures = {"fails": type(error).__name__}
            rows[f"{architecture}, {optimizer}, {setting}"] = figures
json.dump(rows, open(sys.argv[1], "w"))
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Predict in both checkouts, compare, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path, nargs="?", default=_HERE)
    options = parser.parse_args(argv)
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    figures: dict[str, Any] = {side: commit_of(path) for side, path in checkouts.items()}
    for place, rows_of in (("cpu", _cpu_rows), ("gpu", _gpu_rows)):
        found = {side: rows_of(path) for side, path in checkouts.items()}
        figures[place] = compared(found["before"], found["after"])
    save_result("same_bytes", figures)
    write_page.main()


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows of both sides, and the names of those that differ or are on one side."""
    names = list(dict.fromkeys([*before, *after]))
    return {
        "num_rows": len(names),
        "differing": [name for name in names if before.get(name) != after.get(name)],
        "table": {name: [before.get(name), after.get(name)] for name in names},
    }


def _cpu_rows(checkout: Path) -> dict[str, Any]:
    """Predict and measure the rows of the CPU."""
    return _run(checkout, lambda out: ["-c", _CPU_ROWS, out])


def _gpu_rows(checkout: Path) -> dict[str, Any]:
    """Predict what other people measured on GPUs; nothing is known of the measured context."""
    script = str(checkout / "benchmarks" / "score_accuracy.py")
    found = _run(checkout, lambda out: [script, "--json-out", out])
    return {
        row["id"]: {
            quantity: [figure["predicted_bytes"], figure["low_bytes"], figure["high_bytes"]]
            for quantity, figure in row["figures"].items()
        }
        for row in found["rows"]
    }


def _run(checkout: Path, words: Any) -> dict[str, Any]:
    """Run a script with the code of a checkout, and read what it writes."""
    code = os.pathsep.join(str(checkout / folder) for folder in ("src", "benchmarks"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        subprocess.run(
            [sys.executable, *words(str(out))],
            check=True,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": code, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        result: dict[str, Any] = json.loads(out.read_text())
    return result


if __name__ == "__main__":
    main()
