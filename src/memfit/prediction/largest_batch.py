"""Finds the most samples at a time with which a job fits: micro-batches, or larger batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.allocator.settings import AllocatorSettings
from memfit.devices.spec import CUDA, Device
from memfit.errors import MemfitError
from memfit.figures import Prediction
from memfit.job import Job
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.predict import evaluate
from memfit.prediction.process_memory import bounded_bytes
from memfit.prediction.recording import Recording, record
from memfit.prediction.shared_recordings import SharedRecordings, job_recording
from memfit.session.batches import BatchLayout, is_made_without_values
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan, conflict, in_catalogue_order

_NOISE = 1.1
"""Fragmentation bends the curve of process bytes over the micro-batch by up to a tenth."""
_INTERPOLATIONS = 3
_MOST_DOUBLINGS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestMicroBatch:
    """The largest micro-batch with which the step fits, or the reason why none does."""

    micro_batch_size: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The most samples at a time with which the step fits, or the reason why none do."""

    batch_size: int | None
    is_most: bool = True
    """Whether more were looked at, and do not fit."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedJob:
    """A job, how it is run, and what a recording of it gave on a device."""

    job: Job
    plan: Plan
    layout: BatchLayout
    device: Device
    settings: AllocatorSettings
    recording: Recording
    prediction: Prediction
    recordings: SharedRecordings | None = None
    """Those of several devices; None records for this one alone."""

    def with_plan(self, plan: Plan) -> Prediction:
        """Predict the same job on the same device under another plan, with the same budget."""
        return self._predicted(self.job, plan)

    def with_batch_size(self, batch_size: int) -> Prediction:
        """Predict the same step with another effective batch."""
        return self._predicted(replace(self.job, batch_size=batch_size), self.plan)

    def bytes_with(self, job: Job, plan: Plan) -> int:
        """Return what the budget bounds, of another batch or plan."""
        if self.recordings is None or self.device.kind != CUDA:
            return self._predicted(job, plan).bounded_bytes()
        replays = self.recordings.of_job(job, plan, self.layout, device=self.device)
        return bounded_bytes(replays, self.device, self.prediction.budget_of)

    def _predicted(self, job: Job, plan: Plan) -> Prediction:
        budget = MemoryBudget(num_bytes=self.prediction.budget_bytes, of=self.prediction.budget_of)
        if self.recordings is None:
            recording, replays = record(job, plan, self.layout, device=self.device), None
        else:
            replays = self.recordings.of_job(job, plan, self.layout, device=self.device)
            recording = job_recording(replays)
        return evaluate(
            job,
            recording,
            self.device,
            plan,
            budget=budget,
            settings=self.settings,
            replays=replays,
        )


def largest_batch(job: PredictedJob) -> LargestBatch:
    """Find the most samples at a time that fit.

    Where the job's batch fits it is doubled as long as it does, if the step is quick to record and
    batches of any size can be made without their values. Where it does not, it is cut into
    micro-batches.
    """
    batch_size = job.job.batch_size
    if job.prediction.fits is False or job.plan.splitting is not None:
        found = largest_micro_batch(job)
        return LargestBatch(
            batch_size=found.micro_batch_size,
            is_most=found.micro_batch_size != batch_size,
            reason=found.reason,
        )
    budget_bytes = job.prediction.budget_bytes
    is_quick = not job.recording.is_long and is_made_without_values(job.job)
    if budget_bytes is None or not is_quick:
        return LargestBatch(batch_size=batch_size, is_most=False)
    for doublings in range(1, _MOST_DOUBLINGS + 1):
        larger = job.job.batch_size << doublings
        try:
            num_bytes = job.bytes_with(replace(job.job, batch_size=larger), job.plan)
        except MemfitError:  # such as a batch function that has so many samples and no more
            break
        if num_bytes > budget_bytes:
            return LargestBatch(batch_size=batch_size)
        batch_size = larger
    return LargestBatch(batch_size=batch_size, is_most=False)


def largest_micro_batch(job: PredictedJob) -> LargestMicroBatch:
    """Find the largest micro-batch with which a job fits its budget, up to its batch.

    Every size that is tried is recorded as it would run. Other strategies of the plan stay.
    """
    own, batch_size = job.plan.splitting, job.job.batch_size
    if own is None and job.prediction.fits is not False:
        return LargestMicroBatch(micro_batch_size=batch_size)
    splitting = own or MicroBatching(micro_batch_size=batch_size)
    others = tuple(member for member in job.plan.strategies if member is not splitting)
    obstacle = splitting.obstacle(job.recording.facts) or conflict((*others, splitting))
    if obstacle:
        return LargestMicroBatch(micro_batch_size=None, reason=obstacle)

    def bytes_with(micro_batch_size: int) -> int:
        member = replace(splitting, micro_batch_size=micro_batch_size)
        plan = Plan(strategies=in_catalogue_order((*others, member)))
        return job.bytes_with(job.job, plan)

    budget_bytes = job.prediction.budget_bytes or 0
    if own and bytes_with(batch_size) <= budget_bytes:
        return LargestMicroBatch(micro_batch_size=batch_size)
    found = largest_fitting(batch_size, budget_bytes, bytes_with)
    reason = "" if found else "not even one sample at a time fits"
    return LargestMicroBatch(micro_batch_size=found, reason=reason)


def largest_fitting(
    too_large: int, budget_bytes: int, bytes_with: Callable[[int], int]
) -> int | None:
    """Find the largest number below ``too_large`` whose bytes are within a budget; None if none is.

    Powers of two are tried from the largest down, since small micro-batches take longest to record.
    Bytes are convex in the number (a maximum of sums that are linear in it), so the line through
    two numbers bounds every smaller one from below. What lies between the last two is interpolated.
    """
    last: tuple[int, int] | None = None
    size = too_large
    while size > 1:
        size = 1 << ((size - 1).bit_length() - 1)
        found_bytes = bytes_with(size)
        if found_bytes <= budget_bytes:
            return _between((size, found_bytes), (too_large, last), budget_bytes, bytes_with)
        if last is not None:
            slope = (last[1] - found_bytes) / (last[0] - size)
            if found_bytes - slope * (size - 1) > _NOISE * budget_bytes:
                return None
        too_large, last = size, (size, found_bytes)
    return None


def _between(
    fitting: tuple[int, int],
    above: tuple[int, tuple[int, int] | None],
    budget_bytes: int,
    bytes_with: Callable[[int], int],
) -> int:
    """Close in on the largest fitting number between one that fits and one that does not."""
    low, low_bytes = fitting
    high = above[0]
    high_bytes = above[1][1] if above[1] else None
    tried = 0
    while high - low > 1:
        guess = (low + high) // 2
        if high_bytes is not None and high_bytes > low_bytes and tried < _INTERPOLATIONS:
            guess = low + (budget_bytes - low_bytes) * (high - low) // (high_bytes - low_bytes)
        guess = min(max(guess, low + 1), high - 1)
        found_bytes = bytes_with(guess)
        tried += 1
        if found_bytes <= budget_bytes:
            low, low_bytes = guess, found_bytes
        else:
            high, high_bytes = guess, found_bytes
    return low
