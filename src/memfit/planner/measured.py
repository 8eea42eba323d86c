"""Plans with figures from this machine: operators are timed, and the fastest plans are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import current_device_name
from memfit.devices.detect import free_memory_bytes
from memfit.devices.spec import CPU, Device
from memfit.errors import DeviceUnavailableError, UnknownDeviceError
from memfit.job import Job
from memfit.planner.candidates import Candidate
from memfit.planner.search import Search
from memfit.prediction import evaluate
from memfit.recording import Recording
from memfit.strategies.plan import Plan
from memfit.timing import time_operators, time_plans

_SLACK = 1.2
"""Plans estimated to take up to this much longer than the best one are run as well."""
_MOST_PLANS = 6
_FREE_SHARE = 0.8
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


def fastest_measured(job: Job, device: Device, best: Candidate, search: Search) -> Candidate:
    """Run the plans that are estimated to be about as fast as the best one; give the fastest.

    Smaller micro-batches are run as well, as long as each is faster than the one before it: no
    estimate says that less memory at a time can be faster, though caches often make it so.
    """
    more = search.further(best, best.prediction.step_seconds * _SLACK, _MOST_PLANS - 1)
    chosen = _fastest_of(job, device, [best, *more])
    while smaller := search.halved(chosen.strategies):
        faster = _fastest_of(job, device, [chosen, smaller])
        if faster.strategies == chosen.strategies:
            return faster
        chosen = faster
    return chosen


def _fastest_of(job: Job, device: Device, candidates: Sequence[Candidate]) -> Candidate:
    """Run plans in turns and give the fastest, with its measured time."""
    plans = [Plan(strategies=candidate.strategies) for candidate in candidates]
    seconds = time_plans(job, plans, device)
    fastest = min(range(len(plans)), key=seconds.__getitem__)
    chosen = candidates[fastest]
    prediction = replace(chosen.prediction, step_seconds=seconds[fastest])
    return replace(chosen, prediction=prediction)
