"""Measures the peak of steps while a job runs, at a bounded cost."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.figures import Timeline
from memfit.observe.allocator_events import AllocatorWatch
from memfit.observe.step_timeline import PhaseMark, step_timeline
from memfit.session.storages import owned_bytes, storages_of
from memfit.trace.events import Phase
from memfit.trace.recorder import Owned

_ALWAYS_MEASURED_STEPS = 3


@dataclass(slots=True)
class StepReading:
    """What was read of one step; the peak is None where the step was not measured."""

    step_seconds: float = 0.0
    measured_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    allocator_retries: int | None = None


class StepMonitor:
    """Measure peaks of steps.

    On a GPU the allocator counts for itself and every step is measured. The CPU allocator has to
    be watched event by event, so there the first steps are measured, every step whose batch is
    larger than any before, and others only while the watched steps, counted whole, take less
    than ``overhead_fraction`` of the run.
    """

    def __init__(
        self, device_type: str, overhead_fraction: float = 0.002, *, takes_timeline: bool = False
    ) -> None:
        self._device_type = device_type
        self._timeline = _TimelineTaker() if takes_timeline and device_type == "cpu" else None
        self._overhead_fraction = overhead_fraction
        self._watched = _Steps()
        self._unwatched = _Steps()
        self._largest_batch_bytes = 0
        self.highest_peak_bytes: int | None = None

    def observe(self, owned: Iterable[Owned], batch_bytes: int) -> _Observation:
        """Time the step inside, and measure its peak where that is due."""
        reading = StepReading()
        if self._device_type == "cuda":
            return _Observation(self, reading, _counted_by_cuda(reading))
        if self.is_due(batch_bytes):
            return _Observation(self, reading, self._watched_on_cpu(reading, owned))
        return _Observation(self, reading, None)

    def mark(self, phase: Phase) -> None:
        """Note that a phase begins."""
        if self._timeline is not None:
            self._timeline.mark(phase)

    def taken_timeline(self) -> Timeline | None:
        """Return the timeline of a step once it was taken, and once only."""
        return None if self._timeline is None else self._timeline.taken()

    @contextmanager
    def _watched_on_cpu(self, reading: StepReading, owned: Iterable[Owned]) -> Iterator[None]:
        owned = list(owned)
        at_start_bytes = storage_bytes(owned)
        with AllocatorWatch() as watch:
            yield
        reading.measured_peak_bytes = at_start_bytes + watch.highest_growth_bytes()
        if self._timeline is not None:
            self._timeline.note(watch, owned)

    def is_due(self, batch_bytes: int) -> bool:
        """Return whether to watch the next step."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # untyped binding
            return False  # the caller's own profile is under way, and there can be only one
        if batch_bytes > self._largest_batch_bytes:
            self._largest_batch_bytes = batch_bytes
            return True
        if self._watched.count < _ALWAYS_MEASURED_STEPS:
            return True
        # Counted whole: what watching adds cannot be told from noise, and a step watched in a quiet
        # moment would make watching look free for good.
        total = self._watched.seconds + self._unwatched.seconds
        next_watched = self._watched.seconds + self._watched.mean_seconds
        return next_watched < self._overhead_fraction * total

    def note_batch(self, batch_bytes: int) -> None:
        """Learn the size of a batch whose step is watched already."""
        self._largest_batch_bytes = max(self._largest_batch_bytes, batch_bytes)

    def account(self, reading: StepReading, seconds: float) -> None:
        """Add the step to the totals."""
        reading.step_seconds = seconds
        peak = reading.measured_peak_bytes
        steps = self._unwatched if peak is None else self._watched
        steps.count += 1
        steps.seconds += seconds
        if peak is not None:
            self.highest_peak_bytes = max(peak, self.highest_peak_bytes or 0)


class _Observation:
    """Time what is inside, and measure it if told how; a step that fails is not accounted for."""

    def __init__(
        self,
        monitor: StepMonitor,
        reading: StepReading,
        measuring: AbstractContextManager[None] | None,
    ) -> None:
        self._monitor = monitor
        self._reading = reading
        self._measuring = measuring
        self._started_seconds = 0.0

    def __enter__(self) -> StepReading:
        self._started_seconds = time.perf_counter()
        if self._measuring is not None:
            self._measuring.__enter__()
        return self._reading

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if self._measuring is not None:
            self._measuring.__exit__(kind, *rest)
        if kind is None:
            self._monitor.account(self._reading, time.perf_counter() - self._started_seconds)


class _TimelineTaker:
    """Take the timeline of the third watched step: the first makes optimizer states."""

    def __init__(self) -> None:
        self._num_watched = 0
        self._marks: list[PhaseMark] = []
        self._timeline: Timeline | None = None

    def mark(self, phase: Phase) -> None:
        """Note that a phase begins."""
        if self._num_watched < _ALWAYS_MEASURED_STEPS:
            self._marks.append(PhaseMark(time.time_ns(), phase))

    def note(self, watch: AllocatorWatch, owned: Sequence[Owned]) -> None:
        """Note that a step was watched; ``owned`` is what was there when it began."""
        self._num_watched += 1
        marks, self._marks = self._marks, []
        if self._num_watched == _ALWAYS_MEASURED_STEPS:
            self._timeline = step_timeline(watch.events(), marks, owned_bytes(owned))

    def taken(self) -> Timeline | None:
        """Return the timeline once."""
        timeline, self._timeline = self._timeline, None
        return timeline


@dataclass(slots=True)
class _Steps:
    """How many steps of a kind there were, and how long they took together."""

    count: int = 0
    seconds: float = 0.0

    @property
    def mean_seconds(self) -> float:
        """Return the mean duration."""
        return self.seconds / self.count


@contextmanager
def _counted_by_cuda(reading: StepReading) -> Iterator[None]:
    torch.cuda.reset_peak_memory_stats()
    yield
    reading.measured_peak_bytes = torch.cuda.max_memory_allocated()
    reading.reserved_peak_bytes = torch.cuda.max_memory_reserved()
    reading.allocator_retries = int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def storage_bytes(owned: Iterable[Owned]) -> int:
    """Add up the bytes of the storages behind tensors, each storage once."""
    return sum(storage.nbytes() for _, storage in storages_of(owned))
