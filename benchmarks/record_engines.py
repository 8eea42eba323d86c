"""Runs every engine on 2 and 4 ranks, and a plan inside half of what DDP takes, and keeps figures.

Run: python benchmarks/record_engines.py     (about half an hour on two cores)

DeepSpeed and a C compiler have to be there. ``bench_engines.py`` does the same for any job.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from results_file import save_result

import memfit
from memfit.files import write_atomically
from memfit.job import load_job
from memfit.strategies import build_strategy

_HERE = Path(__file__).parent
_CASES = (("perceptron", 2), ("perceptron", 4), ("decoder", 2))
_HALVED = ("perceptron", "decoder")
_MOST_RANKS = 4
_HALF = 0.5
_KEPT = _HERE.parent / "build" / "engines"
_CPU = "cpu"


def main() -> None:
    """Run all, and keep the figures."""
    rows = [row for job, ranks in _CASES for row in _rows(job, ranks)]
    halves = [_inside_half(job) for job in _HALVED]
    save_result("engines", {**_summary(rows), "halves": halves, "rows": rows})
    shutil.rmtree(_KEPT)


def _rows(job: str, ranks: int) -> Iterator[dict[str, Any]]:
    for dtype in ((), ("--fp64",)):
        for row in _run(job, ranks, *dtype):
            if not row["refused"]:
                yield {"job": job, **row}


def _run(job: str, ranks: int, *options: str) -> Sequence[dict[str, Any]]:
    """Have real ranks run a job under every engine; what an interrupted call has run is kept."""
    kept = _KEPT / f"{job}-{ranks}{''.join(options[:1])}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, _printed_by_ranks(job, ranks, *options))
    rows: list[dict[str, Any]] = json.loads(kept.read_text())["rows"]
    return rows


def _printed_by_ranks(job: str, ranks: int, *options: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [
        *[*torchrun, str(_HERE / "bench_engines.py")],
        *["--job", f"{_HERE}/engines/jobs.py:{job}", "--json", *options],
    ]
    print(job, ranks, *options, file=sys.stderr)
    environment = {**os.environ, "DS_ACCELERATOR": _CPU}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment, timeout=3600
    )
    # DeepSpeed says on standard output what it has built.
    return done.stdout[done.stdout.index('{\n "rows"') :]


def _inside_half(job: str) -> dict[str, Any]:
    """Plan for four ranks inside half of what DDP takes on each, and carry the plan out."""
    ranks = _MOST_RANKS
    made = load_job(f"{_HERE}/engines/jobs.py:{job}")
    replicas = memfit.Plan(strategies=(build_strategy("ddp", {}),), ranks=ranks)
    full = memfit.predict(made, plan=replicas, ranks=ranks).peak_allocated_bytes
    budget = int(full * _HALF)
    plan = memfit.plan(made, device=_CPU, budget=budget, ranks=(ranks,))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "half.yaml"
        plan.save(file)
        rows = _run(job, ranks, "--plan", str(file))
    return {
        "job": job,
        "ranks": ranks,
        "ddp_peak_bytes": full,
        "budget_bytes": budget,
        "plan": rows[0]["plan"],
        "predicted_peak_bytes": max(row["predicted_peak_bytes"] for row in rows),
        "measured_peak_bytes": max(row["measured_peak_bytes"] for row in rows),
        "loss_difference": max(row["loss_difference"] for row in rows),
        "weight_difference": max(row["weight_difference"] for row in rows),
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    zero = [row for row in rows if row["engine"].startswith("zero")]
    recorded = [row for row in rows if row not in zero]
    double = [row for row in recorded if row["dtype"] == "float64"]
    return {
        "worst_difference_fp32": _worst([row for row in recorded if row not in double]),
        "worst_difference_fp64": _worst(double),
        "worst_difference_zero_fp32": _worst(zero),
        "worst_error_fraction": max((row["error_fraction"] for row in recorded), key=abs),
        "num_to_the_byte": sum(row["error_fraction"] == 0 for row in recorded),
        "num_recorded": len(recorded),
    }


def _worst(rows: Sequence[dict[str, Any]]) -> float:
    return max(max(row["weight_difference"], row["loss_difference"]) for row in rows)


if __name__ == "__main__":
    main()
