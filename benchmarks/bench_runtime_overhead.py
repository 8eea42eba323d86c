"""What Run.step costs over a bare loop, on ConvE with UMLS, side by side in one process.

Run: python benchmarks/bench_runtime_overhead.py        (about a minute on two cores)

Bare and memfit steps alternate in short blocks over the same batches, model and optimizer, so that
both see the same machine and the same addresses (two models of one process can differ by a fifth
of their step time, for good, by where their weights lie). What is compared is the median ratio of
neighbouring blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from results_file import save_result

import memfit
from memfit_workloads.conve import WORKLOAD
from memfit_workloads.conve.data import read_graph
from memfit_workloads.conve.job import build_job, sizes_for, training_queries
from memfit_workloads.conve.settings import settings_from

_NUM_BLOCKS = 60
_STEPS_PER_BLOCK = 10


def main() -> None:
    """Alternate blocks of bare and memfit steps."""
    torch.manual_seed(0)
    parser = argparse.ArgumentParser()
    WORKLOAD.add_arguments(parser)
    flags = ["--dataset", "umls", "--output-dir", "unused"]
    settings = settings_from(parser.parse_args(flags), command="")
    graph = read_graph(settings.files, skip_bad_lines=False)
    queries = training_queries(settings, graph)
    job = build_job(settings, sizes_for(settings, graph), queries)
    batches = [
        queries.batch(torch.randperm(len(queries))[: job.batch_size])
        for _ in range(_STEPS_PER_BLOCK)
    ]
    run = memfit.start(job)
    bare = _bare_step(job, run.model, run.optimizer)
    for batch in batches:
        bare(batch)
        run.step(batch)
    ratios, bare_seconds = [], []
    for index in range(_NUM_BLOCKS):
        order = (bare, run.step) if index % 2 else (run.step, bare)
        seconds = {step: _time(step, batches) for step in order}
        ratios.append(seconds[run.step] / seconds[bare])
        bare_seconds.append(seconds[bare] / _STEPS_PER_BLOCK)
    save_result(
        "runtime_overhead",
        {
            "num_steps_each": _NUM_BLOCKS * _STEPS_PER_BLOCK,
            "batch_size": job.batch_size,
            "bare_step_seconds": round(statistics.median(bare_seconds), 5),
            "median_ratio": round(statistics.median(ratios), 4),
            "quartiles_of_ratio": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
            "num_steps_measured": "the first three, then as often as 0.2 % of the time allows",
        },
    )


def _bare_step(
    job: memfit.Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Any], None]:
    """Return the loop that a user would write."""

    def step(batch: Any) -> None:
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _time(step: Callable[[Any], object], batches: list[Any]) -> float:
    started = time.perf_counter()
    for batch in batches:
        step(batch)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
