"""Runs the ways that share the centres among ranks, which are processes of this machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import spawn

from memfit import Job, Plan, Run

from .ways import NUM_RANKS, SINGLE, Bench, Way, gradients, in_double, small, started

NUM_WARM = 3
"""Steps at the beginning; their memory is watched, which slows them."""


def run_over_ranks(
    ways: Sequence[Way], plans: Sequence[Plan], num_rounds: int
) -> list[list[dict[str, Any]]]:
    """Run each way on all ranks at once; return what each rank found, way by way."""
    # A plan holds its prediction, which ranks have no use for.
    strategies = [plan.strategies for plan in plans]
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ways, strategies, num_rounds, folder), nprocs=NUM_RANKS)
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(NUM_RANKS)]
    return [list(of_ranks) for of_ranks in zip(*found, strict=True)]


def _rank(
    rank: int, ways: Sequence[Way], strategies: Sequence[Any], num_rounds: int, folder: str
) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_RANKS
    )
    bench = small()
    plans = [Plan(strategies=each) for each in strategies]
    found = [
        _found(bench, bench.job(way, rank), plan, num_rounds)
        for way, plan in zip(ways, plans, strict=True)
    ]
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _found(bench: Bench, job: Job, plan: Plan, num_rounds: int) -> dict[str, Any]:
    """Return gradients, peak and times of one way on this rank."""
    double = in_double(job)
    with started(double, plan, is_shared=True) as run:
        loss, found = gradients(run, double.batch(job.batch_size))
    batch = job.batch(job.batch_size)
    with (
        started(job, plan, is_shared=True) as shared,
        started(bench.job(SINGLE), Plan()) as alone,
    ):
        for _ in range(NUM_WARM):
            _turn(shared, alone, batch)
        turns = [_turn(shared, alone, batch) for _ in range(num_rounds)]
        peak_bytes = shared.measured_peak_bytes
    return {"loss": loss, "gradients": found, "peak_bytes": peak_bytes, "turns": turns}


def _turn(shared: Run, alone: Run, batch: Tensor) -> dict[str, float]:
    """Take a step with the others, and one alone while they sleep, on the first rank."""
    dist.barrier()
    seconds, processor_seconds = timed(shared, batch)
    dist.barrier()
    turn = {"seconds": seconds, "processor_seconds": processor_seconds}
    if dist.get_rank() == 0:
        turn["alone_seconds"], turn["alone_processor_seconds"] = timed(alone, batch)
    return turn


def timed(run: Run, batch: Tensor) -> tuple[float, float]:
    """Take a step, and return how long it took, and how long it kept processors busy."""
    began, processor_began = time.perf_counter(), time.process_time()
    run.step(batch)
    return time.perf_counter() - began, time.process_time() - processor_began
