"""Whether plans are as fast where earlier calls have recorded some: budgets asked in a row.

Run: python benchmarks/bench_known_plans.py [--jobs NAME ...]

The ordinary trainings of ``bench_plan_command.py`` are planned for several budgets one after the
other, each with what the calls before have kept and with nothing kept. Nothing is timed, so it may
run beside other work; it takes ten minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from results_file import save_result

import memfit
from memfit.devices.catalogue import load_device
from memfit.errors import NoPlanFitsError
from memfit.job import load_job
from memfit.planner.cache.recording_cache import RecordingCache

NAME = "known_plans"
_HERE = Path(__file__).resolve().parent
_JOBS = ("nanogpt", "bert", "resnet50", "lora", "unet")
_DEVICE = "rtx-3060-12gb"
_BUDGETS = ("11GiB", "8GiB", "9GiB", "7.5GiB")


def main() -> None:
    """Ask for all budgets, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", nargs="*", choices=_JOBS, default=list(_JOBS))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.jobs:
        for row in _asked(name):
            rows.append(row)
            print(row, flush=True)
    if set(arguments.jobs) == set(_JOBS):
        save_result(NAME, {"rows": rows, "device": _DEVICE})


def _asked(name: str) -> Iterator[dict[str, Any]]:
    """Plan for each budget, with what was kept of those before and without."""
    with tempfile.TemporaryDirectory() as kept:
        for budget in _BUDGETS:
            after_others = _planned(name, budget, Path(kept))
            with tempfile.TemporaryDirectory() as nothing:
                alone = _planned(name, budget, Path(nothing))
            yield {"job": name, "budget": budget, "after_others": after_others, "alone": alone}


def _planned(name: str, budget: str, folder: Path) -> dict[str, Any] | None:
    """Return what was chosen; None if nothing fits."""
    reference = f"{_HERE / 'plan_command' / name}.py:job"
    cache = RecordingCache(folder, reference, load_device(_DEVICE))
    with cache.used():
        try:
            plan = memfit.plan(load_job(reference), _DEVICE, budget, cache=cache)
        except NoPlanFitsError:
            return None
    assert plan.prediction is not None, "the planner predicts what it plans"
    return {
        "strategies": plan.labels(),
        "step_seconds": plan.prediction.step_seconds,
        "process_bytes": plan.prediction.process_bytes,
        "num_considered": len(plan.considered),
    }


if __name__ == "__main__":
    main()
