"""Plans with figures from this machine: operators are timed, and the fastest plans are run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter

from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import current_device_name
from memfit.devices.detect import free_memory_bytes
from memfit.devices.spec import CPU, Device
from memfit.errors import DeviceUnavailableError, UnknownDeviceError
from memfit.job import Job
from memfit.measurement.timing import time_operators, time_plans
from memfit.planner.search.candidates import Candidate
from memfit.planner.search.refinements import without_recomputation
from memfit.planner.search.search import Search
from memfit.prediction.predict import evaluate
from memfit.prediction.recording import Recording
from memfit.separation.separation import Separation
from memfit.strategies.plan import Plan

_SLACK = 1.2
"""Plans estimated to take up to this much longer than the best one may be run as well."""
_MOST_PLANS = 8
_MOST_FOUND = 24
"""So many are looked at, and left alone if they are known to be too slow."""
_NEAR = 1.25
"""Plans that took up to this many times the least are run again, in turns."""
_FEW_ROUNDS, _ROUNDS, _MANY_ROUNDS = 3, 5, 6
_SHORT_SECONDS = 0.3
"""Estimated steps shorter than this are compared in more turns, as each sees little."""
_IMPRESSION_SECONDS = 3.0
"""After so long a first impression has what rounds it has."""
_SMALLER_GAIN = 0.03
"""What no estimate speaks for, such as smaller micro-batches, must save this share of a step.

Where plans cannot take short turns, the same plan, timed again on two shared cores, differed by
10 % and more in a tenth of the cases.
"""
_FREE_SHARE = 0.8
_TOGETHER_SHARE = 0.5
"""Of free memory that plans may take which are run in turns while all their models live."""
_FEWER = 4


def check_is_here(device: Device) -> None:
    """Refuse to measure on a device that this machine is not.

    Raises:
        DeviceUnavailableError: if it is not here.
    """
    if device.kind == CPU:
        return
    try:
        here = current_device_name()
    except UnknownDeviceError as error:
        raise DeviceUnavailableError(device.name, str(error)) from None
    if here != device.name:
        raise DeviceUnavailableError(device.name, f"this machine is {here}")


def measured_times(job: Job, device: Device, plain: Recording) -> OperatorTimes:
    """Time the operators of the job as it is, on a smaller batch if the whole one does not fit.

    A quarter of it is run as well, to see what micro-batches pay more often.
    """
    prediction = evaluate(job, plain, device, Plan())
    here_bytes = free_memory_bytes() if device.kind == CPU else None
    free_bytes = here_bytes or device.memory_bytes
    batch_size = job.batch_size
    peak_bytes = prediction.peak_allocated_bytes
    while batch_size > 1 and peak_bytes > _FREE_SHARE * free_bytes:
        batch_size //= 2
        peak_bytes //= 2
    sizes = (batch_size, max(1, batch_size // _FEWER))
    return time_operators(job, device, tuple(dict.fromkeys(sizes)))


@dataclass(frozen=True, slots=True)
class PlanClock:
    """Runs a job under plans on this machine, side by side."""

    job: Job
    device: Device
    known: Separation | None = None
    """What planning has found out about pieces of the batch."""

    def first_impression(self, candidates: Sequence[Candidate]) -> list[float]:
        """Run plans in a few turns, where a turn is so short that the machine may slow in one."""
        return self._seconds(candidates, _FEW_ROUNDS, _IMPRESSION_SECONDS)

    def compared(self, candidates: Sequence[Candidate]) -> list[float]:
        """Run plans in as many turns as tell them apart."""
        is_short = all(each.prediction.step_seconds < _SHORT_SECONDS for each in candidates)
        return self._seconds(candidates, _MANY_ROUNDS if is_short else _ROUNDS)

    def _seconds(
        self, candidates: Sequence[Candidate], num_rounds: int, enough_seconds: float = math.inf
    ) -> list[float]:
        return time_plans(
            self.job,
            [Plan(strategies=each.strategies) for each in candidates],
            self.device,
            known=self.known,
            num_rounds=num_rounds,
            enough_seconds=enough_seconds,
            all_fit=self._all_fit(candidates),
        )

    def _all_fit(self, candidates: Sequence[Candidate]) -> bool:
        """Return whether all of them fit the free memory here at once.

        On a card they are run one by one, as the memory is what there is little of.
        """
        free_bytes = free_memory_bytes() if self.device.kind == CPU else None
        taken = (each.prediction.peak_allocated_bytes for each in candidates)
        return free_bytes is not None and sum(taken) <= _TOGETHER_SHARE * free_bytes


def fastest_measured(clock: PlanClock, best: Candidate, search: Search) -> Candidate:
    """Run plans that may be about as fast as the best one, and give the fastest.

    Whatever is estimated to be faster than the fastest so far really is may yet be it, so the
    search goes on up to that time. What was measured of a combination corrects the estimates of
    those that have the same strategies and more. Last, a smaller micro-batch, a strategy more that
    costs little and a strategy less are run as long as one is clearly faster than the plan before:
    no estimate says that less memory at a time can be faster, though caches often make it so. Where
    the time is over, first impressions have to do.
    """
    found, timed = [best], [_timed(clock, best)]
    while len(timed) < _MOST_PLANS and len(found) < _MOST_FOUND and not search.is_over:
        fastest_seconds = min(each.seconds for each in timed)
        most_seconds = max(fastest_seconds, best.prediction.step_seconds * _SLACK)
        candidate = search.further(found, most_seconds)
        if candidate is None:
            break
        found.append(candidate)
        if candidate.prediction.step_seconds * _usual_error(candidate, timed) <= most_seconds:
            timed.append(_timed_beside(clock, candidate, timed[0]))
    least_seconds = min(each.seconds for each in timed)
    if search.is_over:
        return min(timed, key=attrgetter("seconds")).measured()
    near = [each.candidate for each in timed if each.seconds <= _NEAR * least_seconds]
    chosen = min(_run(clock, near), key=_seconds_of)
    while not search.is_over:
        faster = _clearly_faster(clock, list(search.perhaps_faster(chosen.strategies)), chosen)
        if faster is None:
            break
        chosen = faster
    return chosen


def _clearly_faster(
    clock: PlanClock, candidates: Sequence[Candidate], other: Candidate
) -> Candidate | None:
    """Return the fastest candidate with its measured time if it is clearly faster, twice in a row.

    What chance shows once, it rarely shows again.
    """
    if not candidates:
        return None
    first_seconds, *seconds = clock.first_impression([other, *candidates])
    fastest_seconds, fastest = min(zip(seconds, candidates, strict=True), key=itemgetter(0))
    if fastest_seconds > first_seconds * (1 - _SMALLER_GAIN):
        return None
    other, fastest = _run(clock, [other, fastest])
    is_faster = _seconds_of(fastest) <= _seconds_of(other) * (1 - _SMALLER_GAIN)
    return fastest if is_faster else None


@dataclass(frozen=True, slots=True)
class _Timed:
    """A candidate that was run."""

    candidate: Candidate
    seconds: float

    @property
    def error(self) -> float:
        """Return how many times longer it took than was estimated."""
        return self.seconds / self.candidate.prediction.step_seconds

    def measured(self) -> Candidate:
        """Return the candidate with its measured time."""
        return _with_seconds(self.candidate, self.seconds)


def _timed(clock: PlanClock, candidate: Candidate) -> _Timed:
    """Run a plan by itself, for a first impression."""
    (seconds,) = clock.first_impression([candidate])
    return _Timed(candidate, seconds)


def _timed_beside(clock: PlanClock, candidate: Candidate, known: _Timed) -> _Timed:
    """Run a plan next to one that was run before, since machines are not always equally fast."""
    again_seconds, seconds = clock.first_impression([known.candidate, candidate])
    return _Timed(candidate, known.seconds * seconds / again_seconds)


def _usual_error(candidate: Candidate, timed: Sequence[_Timed]) -> float:
    """Return how far too low an estimate is, by what was run with the same strategies or fewer."""
    mine = set(without_recomputation(candidate.strategies))
    others = ((each, without_recomputation(each.candidate.strategies)) for each in timed)
    return max((each.error for each, theirs in others if mine.issuperset(theirs)), default=1.0)


def _run(clock: PlanClock, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Run plans in turns and give each with its measured time."""
    timed = zip(candidates, clock.compared(candidates), strict=True)
    return [_with_seconds(candidate, seconds) for candidate, seconds in timed]


def _seconds_of(candidate: Candidate) -> float:
    return candidate.prediction.step_seconds


def _with_seconds(candidate: Candidate, seconds: float) -> Candidate:
    return replace(candidate, prediction=replace(candidate.prediction, step_seconds=seconds))
