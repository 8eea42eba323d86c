"""Steps of several plans in turns, while the models of all of them live."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memfit.devices.spec import CPU
from memfit.job import Job
from memfit.runtime.run import Run, open_plain_session, unguarded_run
from memfit.separation.separation import Separation
from memfit.session.batches import BatchLayout, real_batch
from memfit.session.borrowing import borrowed_to_run
from memfit.session.deterministic_draws import untouched_randomness
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.plan import Plan

_NUM_TURNS, _NUM_LONG_TURNS = 4, 2
"""Turns of each plan before models are built anew: where weights lie changes the time of a step."""
_TURN_STEPS = 2
"""The first step of a turn finds caches full of what another plan has left."""
_LONG_SECONDS = 0.5
"""A step this long does not notice it, and is a turn; so are fewer of them enough."""


@contextmanager
def opened(
    job: Job, plan: Plan, device_kind: str, layout: BatchLayout, known: Separation | None = None
) -> Iterator[tuple[Run, Any]]:
    """Give a run of the job and a batch; what lives already is afterwards as it was."""
    with _opened(job, plan, device_kind, layout, known) as (run, borrowed_job):
        yield run, _batch(borrowed_job, device_kind)


@contextmanager
def _opened(
    job: Job, plan: Plan, device_kind: str, layout: BatchLayout, known: Separation | None
) -> Iterator[tuple[Run, Job]]:
    with borrowed_to_run(job) as borrowed_job:
        session = open_plain_session(borrowed_job, device_kind, layout)
        if known is not None:
            separation = Separation(session.job, layout)
            separation.learn(known.findings())
            gather_facts(session, separation=separation)
        with closing(unguarded_run(session, plan)) as run:
            yield run, borrowed_job


def _batch(job: Job, device_kind: str) -> Any:
    batch = real_batch(job, job.batch_size)
    if device_kind == CPU:
        return batch
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device_kind), batch)


def seconds_in_turns(
    job: Job,
    plans: Sequence[Plan],
    device_kind: str,
    layout: BatchLayout,
    known: Separation | None = None,
) -> list[list[float]] | None:
    """Run each plan for a few turns, one after the other, and give the seconds of a step in each.

    On a machine that others share, speed changes within seconds: what runs a fraction of a second
    apart is told apart far better than what is built, run and closed first. Of two small models
    under the same plan the ratio of times, over six rounds, was off by 7 % (one standard
    deviation) where each was built and run by itself, and by 1 % so; docs/how-planning-works.md.

    Args:
        job: what is run.
        plans: under which; all of them have to fit the memory at once.
        device_kind: where.
        layout: of the job's batches.
        known: what has been found out about pieces of the batch, and is not looked into again.

    Returns:
        The seconds by plan and turn; None if the job's model lives already, so that there are not
        several at once.
    """
    with ExitStack() as stack:
        runs: list[Run] = []
        for plan in plans:
            with untouched_randomness():  # so that all models begin with the same weights
                opened_now = _opened(job, plan, device_kind, layout, known)
                run, borrowed_job = stack.enter_context(opened_now)
            if runs and _share_modules(run, runs[0]):
                return None
            runs.append(run)
        if not runs:
            return []
        batch = _batch(borrowed_job, device_kind)
        first_seconds = [seconds_of_step(run, batch) for run in runs]
        num_turns = _NUM_TURNS if max(first_seconds) < _LONG_SECONDS else _NUM_LONG_TURNS
        turns = [[_turn(run, batch) for run in runs] for _ in range(num_turns)]
    return [list(seconds) for seconds in zip(*turns, strict=True)]


def _share_modules(run: Run, other: Run) -> bool:
    mine = {id(module) for module in run.model.modules()}
    return any(id(module) in mine for module in other.model.modules())


def _turn(run: Run, batch: Any) -> float:
    """Return the seconds of the shorter of two steps, or of one that is long."""
    least_seconds = float("inf")
    for _ in range(_TURN_STEPS):
        seconds = seconds_of_step(run, batch)
        least_seconds = min(least_seconds, seconds)
        if seconds > _LONG_SECONDS:
            break
    return least_seconds


def seconds_of_step(run: Run, batch: Any) -> float:
    """Run a step and return how long it took, with whatever it left the device to do."""
    started = time.perf_counter()
    run.step(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
