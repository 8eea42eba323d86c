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

import torch
from paired_timing import bare_step, block_of, ratio_figures, take_turns
from results_file import save_result

import memfit
from memfit_workloads.conve import WORKLOAD
from memfit_workloads.conve.data import read_graph
from memfit_workloads.conve.settings import settings_from
from memfit_workloads.conve.train import (
    build_job,
    sizes_for,
    training_batches,
    training_queries,
)

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
    cut = training_batches(settings, queries)
    job = build_job(settings, sizes_for(settings, graph), cut)
    batches = [
        cut.batch(torch.randperm(len(queries))[: job.batch_size]) for _ in range(_STEPS_PER_BLOCK)
    ]
    run = memfit.start(job)
    bare = bare_step(job, run.model, run.optimizer)
    blocks = [block_of(run.step, batches), block_of(bare, batches)]
    list(take_turns(blocks, range(1)))
    rounds = list(take_turns(blocks, range(_NUM_BLOCKS)))
    save_result(
        "runtime_overhead",
        {
            "num_steps_each": _NUM_BLOCKS * _STEPS_PER_BLOCK,
            "batch_size": job.batch_size,
            "bare_step_seconds": round(
                statistics.median(bare for _, bare in rounds) / _STEPS_PER_BLOCK, 5
            ),
            **ratio_figures([ours / bare for ours, bare in rounds]),
            "num_steps_measured": "the first three, then as often as 0.2 % of the time allows",
        },
    )


if __name__ == "__main__":
    main()
