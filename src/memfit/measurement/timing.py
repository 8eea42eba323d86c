"""Times steps and operators where the device is at hand: really run, never estimated."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memfit.cost.operator_times import OperatorTimes, TimedOperators, times_from_measured
from memfit.devices.spec import CPU, Device
from memfit.job import Job
from memfit.runtime.run import Run, open_plain_session, unguarded_run
from memfit.separation.separation import Separation
from memfit.session.batches import BatchLayout, find_layout, real_batch
from memfit.session.borrowing import borrowed_to_run
from memfit.session.deterministic_draws import untouched_randomness
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.plan import Plan
from memfit.trace.events import Operation, Phase
from memfit.trace.modes import OperatorMode
from memfit.trace.operators import describe

_NUM_STEPS = 3
_FAR = 1.15
"""A plan that took this many times the fastest one's seconds is not run again."""
_NUM_OPERATOR_ROUNDS = 3
_ENOUGH_ROUND_SECONDS = 4.0
"""Rounds that took longer are long enough to see the machine at its usual speed."""
_ENOUGH_SECONDS = 2.0
"""Steps are repeated until they have taken so long together, or as often as need be."""
_NUM_TURNS, _NUM_LONG_TURNS = 4, 2
"""Turns of each plan before models are built anew: where weights lie changes the time of a step."""
_TURN_STEPS = 2
"""The first step of a turn finds caches full of what another plan has left."""
_LONG_SECONDS = 0.5
"""A step this long does not notice it, and is a turn; so are fewer of them enough."""


def time_operators(job: Job, device: Device, batch_sizes: Sequence[int]) -> OperatorTimes:
    """Run a few steps of a job here and learn how long its operators take.

    Operators are timed one after the other in two steps; the steps before and between are timed
    as a whole, and the operators scaled to add up to them.

    Args:
        job: what to run, as it is.
        device: the device of the catalogue that this machine is.
        batch_sizes: how many samples to run it on; the steps must fit this machine's memory.
            Several tell apart what a call takes whatever its size.
    """
    jobs = [replace(job, batch_size=size) for size in batch_sizes]
    layout, started = find_layout(job), time.perf_counter()
    rounds: list[list[TimedOperators]] = []
    for _ in range(_NUM_OPERATOR_ROUNDS if device.kind == CPU else 1):
        rounds.append([_timed_operators(each, device, layout) for each in jobs])
        if time.perf_counter() - started > _ENOUGH_ROUND_SECONDS:
            break
    return times_from_measured(device, [_least(of_size) for of_size in zip(*rounds, strict=True)])


def _least(rounds: Sequence[TimedOperators]) -> TimedOperators:
    """Return what each operator of the same steps took where it was disturbed least."""
    fastest = min(rounds, key=lambda each: each.steps_seconds)
    alike = [each.timed for each in rounds if len(each.timed) == len(fastest.timed)]
    least = [
        (calls[0][0], min(seconds for _, seconds in calls)) for calls in zip(*alike, strict=True)
    ]
    return TimedOperators(least, fastest.steps_seconds)


def _timed_operators(job: Job, device: Device, layout: BatchLayout) -> TimedOperators:
    """Time the operators of two steps, and whole steps before and after them."""
    with _opened(job, Plan(), device.kind, layout) as (run, batch):
        run.step(batch)
        step_seconds = shortest_step(run, batch)
        timer = OperatorTimer(device.kind)
        for _ in range(2):
            with timer:
                run.step(batch)
        step_seconds = min(step_seconds, shortest_step(run, batch))
    return TimedOperators(timer.timed, 2 * step_seconds)


def time_plans(
    job: Job,
    plans: Sequence[Plan],
    device: Device,
    *,
    known: Separation | None = None,
    num_rounds: int = 5,
    enough_seconds: float = math.inf,
    all_fit: bool = False,
) -> list[float]:
    """Run a job under several plans here, in turns, and give the usual seconds of a step of each.

    Each round builds the models anew. Plans that turn out to be far slower than the fastest are
    not run again. The first plan is, as the others are measured by it, turn by turn: a machine that
    others share is not always equally fast.

    Args:
        job: what is run.
        plans: under which; the first one is what the others are compared with.
        device: the device of the catalogue that this machine is.
        known: what has been found out about pieces of the batch, and is not looked into again.
        num_rounds: how many times each model is built.
        enough_seconds: after which no further round begins.
        all_fit: whether what all of them take fits the memory at once, so that turns may be short.
    """
    layout, started = find_layout(job), time.perf_counter()
    seconds: list[list[float]] = [[] for _ in plans]
    for _ in range(num_rounds):
        racing = _racing(seconds)
        of_plans = [plans[position] for position in racing]
        turns = seconds_in_turns(job, of_plans, device.kind, layout, known) if all_fit else None
        all_fit = turns is not None
        if turns is None:
            turns = [_alone(job, plan, device.kind, layout, known) for plan in of_plans]
        for position, found in zip(racing, turns, strict=True):
            seconds[position] += found
        if time.perf_counter() - started > enough_seconds:
            break
    return [_usual(found, seconds[0]) for found in seconds]


def _racing(seconds: Sequence[Sequence[float]]) -> list[int]:
    """Return the positions of the first plan and of those that are not far behind."""
    most_seconds = _FAR * min((min(found) for found in seconds if found), default=math.inf)
    return [
        position
        for position, found in enumerate(seconds)
        if position == 0 or not found or min(found) <= most_seconds
    ]


def _alone(
    job: Job, plan: Plan, device_kind: str, layout: BatchLayout, known: Separation | None
) -> list[float]:
    """Run a plan while no other model lives, and give the seconds of its one turn."""
    with _opened(job, plan, device_kind, layout, known) as (run, batch):
        run.step(batch)
        return [shortest_step(run, batch)]


def _usual(seconds: Sequence[float], beside: Sequence[float]) -> float:
    """Return the usual seconds, by the usual ratio to what ran in the same turns."""
    ratios = [mine / other for mine, other in zip(seconds, beside, strict=False)]
    return statistics.median(ratios) * statistics.median(beside)


class OperatorTimer(OperatorMode):
    """Time every operator by itself."""

    def __init__(self, device_kind: str) -> None:
        super().__init__()
        self._device_kind = device_kind
        self.timed: list[tuple[Operation, float]] = []

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        _wait_for(self._device_kind)
        started = time.perf_counter()
        out = func(*args, **kwargs)
        _wait_for(self._device_kind)
        seconds = time.perf_counter() - started
        operation = describe(func, args, kwargs, out, Phase.FORWARD)
        if operation is not None:
            self.timed.append((operation, seconds))
        return out


def shortest_step(run: Run, batch: Any) -> float:
    """Return the shortest of a few steps, which the machine disturbed least."""
    seconds = []
    for _ in range(_NUM_STEPS):
        seconds.append(seconds_of_step(run, batch))
        if sum(seconds) > _ENOUGH_SECONDS:
            break
    return min(seconds)


def _wait_for(device_kind: str) -> None:
    """Wait until the device has done what it was given."""
    if device_kind != CPU:
        torch.cuda.synchronize()


@contextmanager
def _opened(
    job: Job, plan: Plan, device_kind: str, layout: BatchLayout, known: Separation | None = None
) -> Iterator[tuple[Run, Any]]:
    """Give a run of the job and a batch; what lives already is afterwards as it was."""
    with _run_of(job, plan, device_kind, layout, known) as (run, borrowed_job):
        yield run, _batch(borrowed_job, device_kind)


@contextmanager
def _run_of(
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
                opened_now = _run_of(job, plan, device_kind, layout, known)
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
