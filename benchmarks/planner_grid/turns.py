"""Times plans side by side: in every round each takes its turns, with a model of its own."""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

from memfit import Job, Plan
from memfit.devices.spec import CPU
from memfit.measurement.timing import seconds_in_turns
from memfit.planner.search.candidates import Strategies
from memfit.session.batches import find_layout

Key = TypeVar("Key", bound=Hashable)


def time_in_turns(
    job: Job, plans: Mapping[Key, Strategies], num_rounds: int
) -> dict[Key, list[float]]:
    """Return the seconds of a step in each turn, by plan.

    The order changes from round to round. Models are built anew, since where their weights happen
    to lie changes how long a step takes. Those of all plans live at once.
    """
    layout = find_layout(job)
    seconds: dict[Key, list[float]] = {key: [] for key in plans}
    with torch.random.fork_rng():
        for position in range(num_rounds):
            order = list(plans)
            random.Random(position).shuffle(order)
            in_order = [Plan(strategies=plans[key]) for key in order]
            turns = seconds_in_turns(job, in_order, CPU, layout)
            assert turns is not None, "a model function has to build its model anew"
            for key, found in zip(order, turns, strict=True):
                seconds[key] += found
            gc.collect()
    return seconds


def usual_ratio(seconds: list[float], others: list[float]) -> float:
    """Return the median over turns of how much longer one plan takes than another."""
    return statistics.median(mine / other for mine, other in zip(seconds, others, strict=True))
