"""Whether earlier calls change any plan, and whether a report shows a better plan than it gives.

Run: python benchmarks/bench_known_plans.py [--jobs NAME ...]         (about an hour of one core)

The planner's small jobs, its held-out ones, an example and the ordinary trainings of
``bench_plan_command.py`` are planned for several budgets one after the other, each with what the
calls before have kept and with nothing kept. Nothing is timed but planning, in processor time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from planner_held_out import held_out_jobs
from planner_jobs import planner_jobs
from results_file import save_result

import memfit
from memfit.devices.catalogue import load_device
from memfit.errors import NoPlanFitsError
from memfit.job import load_job
from memfit.planner.cache.recording_cache import RecordingCache

NAME = "known_plans"
_HERE = Path(__file__).resolve().parent
_TRAININGS = ("nanogpt", "bert", "resnet50", "lora", "unet")
_CARD = "rtx-3060-12gb"
_EXAMPLE = "transformer"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A job, and the budgets that are asked for in a row."""

    build: Callable[[], memfit.Job]
    budgets: Sequence[str | float]
    """Sizes, or shares of the peak of the job as it is."""
    device: str = "cpu"


def main() -> int:
    """Ask for all budgets, write the table, and say what is not as promised."""
    warnings.simplefilter("ignore")
    asked = _jobs()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", nargs="*", choices=list(asked), default=list(asked))
    arguments = parser.parse_args()
    rows = []
    for name in arguments.jobs:
        for row in _rows(name, asked[name]):
            rows.append(row)
            print(row, flush=True)
    if set(arguments.jobs) == set(asked):
        save_result(NAME, {"rows": rows, "device": _CARD})
    found = list(faults(rows))
    print("\n".join(found) or f"all {len(rows)} plans as promised")
    return 1 if found else 0


def faults(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is not as promised."""
    for row in rows:
        where, alone = f"{row['job']} at {row['budget']}", row["alone"]
        if alone != row["after_others"]:
            yield f"{where}: after other calls another answer: {alone} {row['after_others']}"
        if alone and alone["shown_faster"]:
            yield f"{where}: a report shows what is faster and fits: {alone['shown_faster']}"


def _jobs() -> dict[str, _Asked]:
    small = {name: _Asked(job, (1.2, 1.0, 0.45, 0.8, 0.6)) for name, job in planner_jobs().items()}
    others = {name: _Asked(job, (1.2, 0.4, 0.8, 0.6)) for name, job in held_out_jobs().items()}
    example = partial(load_job, f"{_HERE.parent / 'examples' / _EXAMPLE}.py:job")
    trainings = {
        name if name not in small else f"{name}-base": _Asked(
            partial(load_job, f"{_HERE / 'plan_command' / name}.py:job"),
            ("11GiB", "8GiB", "9GiB", "7.5GiB"),
            _CARD,
        )
        for name in _TRAININGS
    }
    return {**small, **others, _EXAMPLE: _Asked(example, (1.1, 0.5, 0.35, 0.75)), **trainings}


def _rows(name: str, asked: _Asked) -> Iterator[dict[str, Any]]:
    """Plan for each budget, with what was kept of those before and without."""
    peak_bytes = memfit.predict(asked.build(), device=asked.device).bounded_bytes()
    with tempfile.TemporaryDirectory() as kept:
        for budget in asked.budgets:
            size = budget if isinstance(budget, str) else int(budget * peak_bytes)
            with tempfile.TemporaryDirectory() as nothing:
                begun = time.process_time()
                alone = _planned(name, asked, size, Path(nothing))
                seconds = time.process_time() - begun
            after_others = _planned(name, asked, size, Path(kept))
            yield {
                "job": name,
                "budget": str(budget),
                "after_others": after_others,
                "alone": alone,
                "planning_seconds": round(seconds, 1),
            }


def _planned(name: str, asked: _Asked, budget: str | int, folder: Path) -> dict[str, Any] | None:
    """Return what was chosen; None if nothing fits."""
    cache = RecordingCache(folder, name, load_device(asked.device))
    with cache.used():
        try:
            plan = memfit.plan(asked.build(), asked.device, budget, cache=cache)
        except NoPlanFitsError:
            return None
    assert plan.prediction is not None, "the planner predicts what it plans"
    seconds = plan.prediction.step_seconds
    faster = [each for each in plan.considered if each.fits and each.step_seconds < seconds]
    return {
        "strategies": plan.labels(),
        "step_seconds": seconds,
        "peak_bytes": plan.prediction.bounded_bytes(),
        "num_considered": len(plan.considered),
        "shown_faster": [(each.strategies, each.step_seconds) for each in faster],
    }


if __name__ == "__main__":
    sys.exit(main())
