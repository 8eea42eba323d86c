"""Steps that fail at random operators, each run compared with an undisturbed one to the bit.

Run: python benchmarks/bench_guard_faults.py [--points 1.0]     (about 6 minutes on two cores)

Every run trains five steps with dropout, a scheduler and the optimizer named, and raises an
out-of-memory error at random operators anywhere between the first and the last: in forward,
backward, update, where gradients are dropped, and in what the guard itself does. Compared are
losses, parameters, buffers, optimizer states, learning rate, random states and the number of steps.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from results_file import save_result
from torch.multiprocessing import spawn

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.runtime import guard_faults, guard_ranks

from memfit import Job, Plan
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.fp16 import Fp16
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.strategies.optimizer_in_backward import OptimizerInBackward


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A way to train, and how often it is made to fail."""

    name: str
    job: Callable[[], Job]
    strategies: tuple[Any, ...] = ()
    num_points: int = 30
    faults_per_run: int = 1
    changes_plan: bool = False
    """Whether the run goes on in smaller micro-batches, which rounds otherwise."""


def _momentum(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    groups = [{"params": parameters[:3], "lr": 0.1}, {"params": parameters[3:], "lr": 0.01}]
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-3)


def _smooth() -> Job:
    return guard_faults.build_job(batch_norm=False)


CASES = (
    Case(name="batch normalisation, AdamW", job=guard_faults.build_job, num_points=60),
    Case(
        name="fused AdamW",
        job=guard_faults.build_job,
        strategies=(OptimizerImplementation(implementation="fused"),),
    ),
    Case(
        name="SGD with momentum, two groups",
        job=lambda: guard_faults.build_job(optimizer=_momentum),
    ),
    Case(
        name="activation checkpointing",
        job=guard_faults.build_job,
        strategies=(ActivationCheckpointing(blocks=("4",)),),
    ),
    Case(
        name="micro-batches of 2",
        job=_smooth,
        strategies=(MicroBatching(micro_batch_size=2),),
        num_points=40,
    ),
    Case(
        name="batch normalisation replayed",
        job=guard_faults.build_job,
        strategies=(BatchNormReplay(micro_batch_size=4),),
    ),
    Case(name="optimizer in backward", job=_smooth, strategies=(OptimizerInBackward(),)),
    Case(name="fp16 with a gradient scaler", job=_smooth, strategies=(Fp16(),)),
    Case(name="four failures in a run", job=guard_faults.build_job, faults_per_run=4),
    Case(
        name="goes on in smaller micro-batches", job=guard_faults.without_dropout, changes_plan=True
    ),
)


def main() -> None:
    """Run every case, then the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=float, default=1.0, help="a share of the points")
    share = parser.parse_args().points
    torch.set_num_threads(1)
    rows = [_row(case, share) for case in CASES]
    rows += [_rank_row(kind, max(1, round(40 * share))) for kind in guard_ranks.KINDS]
    save_result(
        "guard_faults",
        {
            "num_points": sum(row["num_points"] for row in rows),
            "num_wrong": sum(row["num_wrong"] for row in rows),
            "rows": rows,
        },
    )


def _row(case: Case, share: float) -> dict[str, Any]:
    """Compare runs of one process."""
    job = case.job()
    plan = Plan() if case.changes_plan else guard_faults.ladder_of(*case.strategies)
    run, wanted, operators = guard_faults.trained(job, plan)
    run.close()
    draw = random.Random(case.name)
    places: Counter[str] = Counter()
    num_wrong, largest, num_points = 0, 0.0, max(1, round(case.num_points * share))
    for _ in range(num_points):
        points = draw.sample(range(1, len(operators) + 1), case.faults_per_run)
        run, found, _ = guard_faults.trained(job, plan, *points)
        run.close()
        places.update(event.phase for event in run.events)
        difference = _difference(found, wanted)
        largest = max(largest, difference)
        num_wrong += difference > (1e-5 if case.changes_plan else 0.0)
    row = {
        "case": case.name,
        "num_points": num_points * case.faults_per_run,
        "num_wrong": num_wrong,
        "largest_difference": largest,
        "recovered_in": dict(sorted(places.items())),
    }
    print(row, flush=True)
    return row


def _difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of anything, relative to its largest value; 0 means equal."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(_tensors_differ(found[name].double(), wanted[name].double()) for name in wanted)


def _tensors_differ(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if torch.equal(found, wanted):
        return 0.0
    difference = (found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)
    return float(difference) if difference.isfinite() else float("inf")


def _rank_row(kind: str, num_points: int) -> dict[str, Any]:
    """Compare runs of two ranks, one of which fails."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        arguments = (2, str(Path(folder, "store")), kind, num_points, 1, folder)
        spawn(guard_ranks.fails_and_goes_on, args=arguments, nprocs=2)
        seconds = time.perf_counter() - started
        said = [Path(folder, f"{kind}-{rank}.txt").read_text() for rank in range(2)]
    row = {
        "case": f"two ranks, {kind}",
        "num_points": num_points,
        "num_wrong": sum(text != "fine" for text in said),
        "largest_difference": 0.0 if said == ["fine", "fine"] else None,
        "seconds": round(seconds, 1),
    }
    print(row, [text for text in said if text != "fine"], flush=True)
    return row


if __name__ == "__main__":
    main()
