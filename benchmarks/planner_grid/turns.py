"""Times plans side by side: in every round each takes its turn, with a model of its own."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

from memfit import Job, Plan, Run
from memfit.devices.spec import CPU
from memfit.planner.search.candidates import Strategies
from memfit.runtime.run import open_plain_session, unguarded_run
from memfit.session.batches import find_layout, real_batch

Key = TypeVar("Key", bound=Hashable)
_NUM_STEPS = 2


def time_in_turns(
    job: Job, plans: Mapping[Key, Strategies], num_rounds: int
) -> dict[Key, list[float]]:
    """Return the seconds of a step in each round, by plan.

    The order changes from round to round. Models are built anew, since where their weights happen
    to lie changes how long a step takes.
    """
    layout = find_layout(job)
    seconds: dict[Key, list[float]] = {key: [] for key in plans}
    with torch.random.fork_rng():
        batch = real_batch(job, job.batch_size)
        for position in range(num_rounds):
            order = list(plans)
            random.Random(position).shuffle(order)
            for key in order:
                run = unguarded_run(
                    open_plain_session(job, CPU, layout), Plan(strategies=plans[key])
                )
                run.step(batch)
                seconds[key].append(min(_step_seconds(run, batch) for _ in range(_NUM_STEPS)))
                run.close()
            gc.collect()
    return seconds


def usual_ratio(seconds: list[float], others: list[float]) -> float:
    """Return the median over rounds of how much longer one plan takes than another."""
    return statistics.median(mine / other for mine, other in zip(seconds, others, strict=True))


def _step_seconds(run: Run, batch: object) -> float:
    started = time.perf_counter()
    run.step(batch)
    return time.perf_counter() - started
