"""Times loops in turns over the same steps, so that all of them see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import torch

from memfit import Job

Step = Callable[[Any], object]


def take_turns(
    blocks: Sequence[Callable[[int], object]], rounds: Iterable[int]
) -> Iterator[list[float]]:
    """Run every block in each round, another first each time; yield the round's seconds.

    Args:
        blocks: some steps of each loop; they are given the number of the round.
        rounds: the numbers of the rounds.
    """
    for number in rounds:
        first = number % len(blocks)
        order = [*range(first, len(blocks)), *range(first)]
        seconds = {which: _seconds(blocks[which], number) for which in order}
        yield [seconds[which] for which in range(len(blocks))]


def rounds_for(seconds: float, first: int = 0) -> Iterator[int]:
    """Yield the numbers of rounds until the time is over."""
    began = time.perf_counter()
    for number in count(first):
        yield number
        if time.perf_counter() - began >= seconds:
            return


def block_of(step: Step, batches: Sequence[Any]) -> Callable[[int], None]:
    """Return the block that takes a step on each batch."""

    def block(_: int) -> None:
        for batch in batches:
            step(batch)

    return block


def bare_step(job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step of the loop that a user would write."""

    def step(batch: Any) -> None:
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ratio_figures(ratios: Sequence[float]) -> dict[str, Any]:
    """Return what is told of the ratios of neighbouring blocks."""
    return {
        "median_ratio": round(statistics.median(ratios), 4),
        "quartiles_of_ratio": [round(q, 4) for q in statistics.quantiles(ratios, n=4)],
    }


def _seconds(block: Callable[[int], object], number: int) -> float:
    started = time.perf_counter()
    block(number)
    return time.perf_counter() - started
