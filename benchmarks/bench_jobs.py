"""Writes jobs out of scripts, and takes each through plan, verify and three real steps.

    python benchmarks/bench_jobs.py [NAME ...]

Each script of ``benchmarks/scripts`` that becomes a job is written by ``memfit job`` in an empty
folder, planned for a share of its plain peak on the CPU, verified, and trained for three steps by
``memfit.start`` with the script's own batches. The allocator's events over those steps, with the
first window of batches that lies there before, are held against the plan's prediction. Nobody edits
a line in between.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from bench_scripts import known_rows
from results_file import write_result

import memfit
from memfit.observe.allocator_events import AllocatorWatch

_SCRIPTS = Path(__file__).parent / "scripts"
_JOBS: dict[str, tuple[float, list[str]]] = {
    "train_moe.py": (0.6, ["--data", "data", "--out", "out"]),
    "nli_accelerate.py": (0.6, ["--data_dir", "data", "--output_dir", "out"]),
    "train_gpt.py": (0.6, ["--data_dir=data", "--out_dir=out"]),
    "train_imagenet.py": (0.7, ["data", "--out", "out"]),
    "train_asr.py": (0.9, ["--data", "data", "--exp", "out"]),
    "attack/metric_learning.py": (0.95, ["--data", "data", "--out", "out"]),
}
"""The share of the plain peak that the plan has to fit, and the script's arguments."""
_NUM_STEPS = 3


def main(names: list[str]) -> int:
    """Take the scripts of these names, or all, the whole way, and keep the figures."""
    if names[:1] == ["--steps"]:
        print(json.dumps(_steps()))
        return 0
    rows = {row["script"]: row for row in known_rows("jobs")}
    for name in names or _JOBS:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = {"script": name, **_row(name, Path(folder))}
        print(json.dumps(rows[name]), flush=True)
        write_result("jobs", {"rows": [rows[each] for each in _JOBS if each in rows]})
    return 0


def _row(name: str, folder: Path) -> dict[str, Any]:
    share, arguments = _JOBS[name]
    row: dict[str, Any] = {"arguments": arguments, "lines_edited": 0}
    script = str(_SCRIPTS / name)
    written = _memfit(folder, ["job", script, "--output", "job.py", "--json", "--", *arguments])
    if "error" in written:
        return {**row, **written}
    keys = ("script_first_step_bytes", "first_step_peak_bytes", "steady_step_peak_bytes")
    row |= {key: written[key] for key in keys}
    row |= {"script_other_bytes": written["script_other_bytes"]}
    row |= {"job_error": written["relative_peak_error"]}
    budget_bytes = int(share * written["steady_step_peak_bytes"])
    plan = ["plan", "job.py:job", "--device", "cpu", "--budget", str(budget_bytes)]
    planned = _memfit(folder, [*plan, "--save", "plan.yaml", "--json"])
    row |= {"budget_share": share, "budget_bytes": budget_bytes}
    if "error" in planned:
        return {**row, **planned}
    prediction = planned["prediction"]
    row |= {
        "strategies": prediction["strategies"],
        "numerics": prediction["numerics"],
        "num_answers": len(prediction["answers"]),
        "predicted_peak_bytes": prediction["peak_allocated_bytes"],
        "interval": prediction["intervals"].get("allocated"),
    }
    verified = _memfit(folder, ["verify", "job.py:job", "--plan", "plan.yaml", "--json"])
    row["verified"] = verified.get("keeps_promise", False)
    row["verify_error"] = verified.get("error")
    steps = _run(folder, [sys.executable, str(Path(__file__).resolve()), "--steps"])
    measured_bytes = steps.get("measured_peak_bytes")
    row |= steps
    if measured_bytes:
        row["plan_error"] = prediction["peak_allocated_bytes"] / measured_bytes - 1
    return row


def _steps() -> dict[str, Any]:
    """Run the job of this folder for a few steps under its plan."""
    spec = importlib.util.spec_from_file_location("job", "job.py")
    assert spec is not None, "it was written"
    assert spec.loader is not None, "it is a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    plan = memfit.Plan.load("plan.yaml")
    windows = list(islice(module.drawn.windows(), _NUM_STEPS))
    with (
        AllocatorWatch() as watch,
        memfit.start(module.job, plan, guard=False) as run,
    ):
        losses = [float(run.step(batch).loss) for batch in windows]
    leaves = torch.utils._pytree.tree_leaves(windows[0])
    batch_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    return {"losses": losses, "measured_peak_bytes": watch.highest_growth_bytes() + batch_bytes}


def _memfit(folder: Path, words: list[str]) -> dict[str, Any]:
    return _run(folder, [sys.executable, "-m", "memfit", *words])


def _run(folder: Path, command: list[str]) -> dict[str, Any]:
    """Run a command that writes one JSON value at the end of its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 3) or "{" not in done.stdout:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
