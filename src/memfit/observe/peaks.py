"""Measures the peak of each step, as the device allows, and lays a step out by category."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.figures import Timeline
from memfit.observe.allocator_blocks import note_blocks, note_living_blocks
from memfit.observe.allocator_events import OTHER_THREADS, AllocatorEvent, GrowthWatch
from memfit.session.storages import owned_bytes, storages_of
from memfit.trace.events import Category, Phase, category_names
from memfit.trace.owners import Owned
from memfit.trace.subclasses import known_parts_of

_ALWAYS_MEASURED_STEPS = 3
_ALWAYS_MEASURED_TRAININGS = 3
"""In one process; where many follow each other, the first steps of each would cost too much."""
_LEFT_BY = {
    Phase.FORWARD: Category.SAVED_ACTIVATIONS,
    Phase.BACKWARD: Category.GRADIENTS,
    Phase.OPTIMIZER: Category.OPTIMIZER_STATE,
}


@dataclass(slots=True)
class StepReading:
    """What was read of one step; the peak is None where the step was not measured."""

    step_seconds: float = 0.0
    measured_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    allocator_retries: int | None = None


class Peaks:
    """Measure the peaks of steps that follow each other; this one measures nothing."""

    highest_peak_bytes: int | None = None
    """Of all steps so far; None before the first that was measured."""
    given_up: str = ""
    """Why no more steps are measured; empty as long as they are."""

    def begin(self, batch_bytes: int, owned: Iterable[Owned] | None) -> None:
        """Begin a step, or learn in the course of one how large its batch is.

        Args:
            batch_bytes: the size of the batch.
            owned: the job's tensors, where they are known.
        """

    def begin_training(self) -> None:
        """Note that the next steps are of another training than those before."""

    def phase(self, phase: Phase) -> None:
        """Note that a phase begins."""

    def end(self) -> StepReading:
        """End the step."""
        return StepReading()

    def drop(self) -> None:
        """End a step that has failed."""

    def account(self, reading: StepReading, seconds: float) -> None:
        """Add a step that took so long to the totals."""
        del seconds
        peak_bytes = reading.measured_peak_bytes
        if peak_bytes is not None:
            self.highest_peak_bytes = max(peak_bytes, self.highest_peak_bytes or 0)

    def taken_timeline(self) -> Timeline | None:
        """Return the timeline of a step once it was taken, and once only."""
        return None

    def close(self) -> None:
        """Measure no more."""


class CudaPeaks(Peaks):
    """Read the counters of the caching allocator, which it keeps for every step."""

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self, batch_bytes: int, owned: Iterable[Owned] | None) -> None:
        """Let the counters begin anew."""
        del batch_bytes, owned
        if not self._has_begun:
            torch.cuda.reset_peak_memory_stats()
        self._has_begun = True

    def end(self) -> StepReading:
        """Take the peaks."""
        self._has_begun = False
        # One call into C; the functions for one figure each build the whole table every time.
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict()
        return StepReading(
            measured_peak_bytes=stats["allocated_bytes"]["all"]["peak"],
            reserved_peak_bytes=stats["reserved_bytes"]["all"]["peak"],
            allocator_retries=stats["num_alloc_retries"],
        )

    def drop(self) -> None:
        """End a step that has failed."""
        self._has_begun = False


class CpuPeaks(Peaks):
    """Watch some steps event by event, within a small share of the time.

    The peak is what lives when watching begins and the highest growth after it. Gradients that live
    then are noted, as they may end inside. Where the job's tensors are not known, what lives is
    found (``allocator_blocks``), and its end is seen; a build of torch that does not let it be seen
    measures nothing. The first steps of a training are watched, every step whose batch is larger
    than any before, and others only while the watched steps, counted whole, take less than
    ``overhead_fraction`` of the run. None is while a profile of the caller's own is under way, as
    there can be only one.

    Args:
        overhead_fraction: the share of the time that watched steps may take.
        takes_timeline: whether to take the timeline of one step.
    """

    def __init__(self, overhead_fraction: float = 0.002, *, takes_timeline: bool = False) -> None:
        self._overhead_fraction = overhead_fraction
        self._takes_timeline = takes_timeline
        self._watched = _Steps()
        self._unwatched = _Steps()
        self._largest_batch_bytes = 0
        self._num_trainings = 1
        self._num_first = 0
        """How many steps of the training under way were watched."""
        self._watch: GrowthWatch | None = None
        self._base_bytes: int | None = None
        """Of the job's tensors when watching began; None where they are not known."""
        self._at_start: dict[Category, int] = {}
        self._marks: list[_PhaseMark] = []
        self._timeline: Timeline | None = None
        self._is_closed = False
        self._thread = threading.get_ident()

    def begin(self, batch_bytes: int, owned: Iterable[Owned] | None) -> None:
        """Watch from here where that is due."""
        if self._watch is not None:
            self._largest_batch_bytes = max(self._largest_batch_bytes, batch_bytes)
            return
        if self._is_closed or not self.is_due(batch_bytes):
            return
        known = None if owned is None else [*owned]
        is_whole = known is not None and all(known_parts_of(each.tensor) for each in known)
        self._base_bytes = storage_bytes(known) if known is not None and is_whole else None
        self._at_start = owned_bytes(known or ()) if self._takes_timeline else {}
        note_blocks(each.tensor for each in known or () if each.category is Category.GRADIENTS)
        self._watch = GrowthWatch()
        self._watch.begin()
        if not is_whole:
            self.given_up = note_living_blocks()  # from here on they count as growth
            if self.given_up:  # and if not, what would be said of the step would be too low
                self.close()

    def begin_training(self) -> None:
        """Watch the first steps of another training, unless there were many before."""
        self._num_trainings += 1
        if self._num_trainings <= _ALWAYS_MEASURED_TRAININGS:
            self._num_first = 0

    def phase(self, phase: Phase) -> None:
        """Note that a phase begins."""
        if self._takes_timeline and self._watch is not None:
            self._marks.append(_PhaseMark(time.time_ns(), phase))

    def end(self) -> StepReading:
        """Return the peak, if the step was watched."""
        watch = self._stopped()
        if watch is None:
            return StepReading()
        # The timeline is that of the third watched step: the first makes optimizer states.
        if self._takes_timeline and self._watched.count == _ALWAYS_MEASURED_STEPS - 1:
            self._timeline = _step_timeline(watch.events(), self._marks, self._at_start)
        self._marks = []
        if self._base_bytes is None:
            return StepReading(measured_peak_bytes=watch.highest_living_bytes())
        return StepReading(measured_peak_bytes=self._base_bytes + watch.highest_growth_bytes())

    def drop(self) -> None:
        """Stop watching a step that has failed."""
        self._stopped()
        self._marks = []

    def account(self, reading: StepReading, seconds: float) -> None:
        """Add a step that took so long to the totals."""
        Peaks.account(self, reading, seconds)
        is_watched = reading.measured_peak_bytes is not None
        steps = self._watched if is_watched else self._unwatched
        self._num_first += is_watched
        steps.count += 1
        steps.seconds += seconds

    def taken_timeline(self) -> Timeline | None:
        """Return the timeline of a step once it was taken, and once only."""
        timeline, self._timeline = self._timeline, None
        return timeline

    def close(self) -> None:
        """Watch no more; a step that is being watched is not measured."""
        self._is_closed = True
        if self._thread == threading.get_ident():  # each thread has a profiler of its own
            with contextlib.suppress(RuntimeError):  # somebody else has stopped it
                self._stopped()

    def is_due(self, batch_bytes: int) -> bool:
        """Return whether to watch the next step."""
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # untyped binding
            return False  # the caller's own profile is under way, and there can be only one
        if batch_bytes > self._largest_batch_bytes:
            self._largest_batch_bytes = batch_bytes
            return True
        if self._num_first < _ALWAYS_MEASURED_STEPS:
            return True
        # Counted whole: what watching adds cannot be told from noise, and a step watched in a quiet
        # moment would make watching look free for good.
        total = self._watched.seconds + self._unwatched.seconds
        next_watched = self._watched.seconds + self._watched.mean_seconds
        return next_watched < self._overhead_fraction * total

    def _stopped(self) -> GrowthWatch | None:
        """Stop watching, and return what has watched the step; None if nothing has."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
        return watch


@dataclass(slots=True)
class _Steps:
    """How many steps of a kind there were, and how long they took together."""

    count: int = 0
    seconds: float = 0.0

    @property
    def mean_seconds(self) -> float:
        """Return the mean duration."""
        return self.seconds / self.count


def storage_bytes(owned: Iterable[Owned]) -> int:
    """Add up the bytes of the storages behind tensors, each storage once."""
    return sum(storage.nbytes() for _, storage in storages_of(owned))


def peaks_on(device_type: str, *, takes_timeline: bool = False) -> Peaks:
    """Return what measures the peaks of steps on a kind of device."""
    return CudaPeaks() if device_type == "cuda" else CpuPeaks(takes_timeline=takes_timeline)


@dataclass(frozen=True, slots=True)
class _PhaseMark:
    """When a phase began."""

    time_ns: int
    phase: Phase


def _step_timeline(
    events: Sequence[AllocatorEvent],
    marks: Sequence[_PhaseMark],
    at_start: Mapping[Category, int],
) -> Timeline:
    """Return the allocated bytes over a step by category.

    A block that forward leaves behind is a saved activation, one that backward leaves behind a
    gradient, one that the update leaves behind optimizer state; all others are temporaries. What
    lay there when the step began is known by its owner.

    Args:
        events: of the allocator during the step, in order.
        marks: when phases began, in order; a step with micro-batches has many.
        at_start: bytes that lay there when the step began.
    """
    phases = list(_phases(events, marks))
    categories = _categories(events, phases)
    changes = (
        (category.value, event.num_bytes)
        for event, category in zip(events, categories, strict=True)
    )
    starts = [
        (position, phase.value)
        for position, phase in enumerate(phases)
        if position == 0 or phase is not phases[position - 1]
    ]
    here = {name: at_start.get(Category(name), 0) for name in category_names(())}
    return Timeline.of(here, changes, starts)


def _phases(events: Sequence[AllocatorEvent], marks: Sequence[_PhaseMark]) -> Iterator[Phase]:
    """Yield the phase of each event."""
    phase, position = Phase.FORWARD, 0
    for event in events:
        while position < len(marks) and marks[position].time_ns <= event.time_ns:
            phase = marks[position].phase
            position += 1
        yield phase


def _categories(events: Sequence[AllocatorEvent], phases: Sequence[Phase]) -> list[Category]:
    """Return the category of each event's block; one that lay there before is a temporary."""
    found = [Category.TEMPORARIES] * len(events)
    allocated: dict[int, int] = {}
    for position, event in enumerate(events):
        if event.num_bytes > 0:
            allocated[event.address] = position
            continue
        address = event.address
        if address == OTHER_THREADS:  # a block as large, most likely the latest
            alike = (a for a, p in allocated.items() if events[p].num_bytes == -event.num_bytes)
            address = max(alike, key=allocated.__getitem__, default=address)
        began = allocated.pop(address, None)
        if began is not None and _outlived(phases[began], phases[position]):
            found[began] = found[position] = _LEFT_BY[phases[began]]
    for began in allocated.values():  # never freed within the step
        found[began] = _LEFT_BY[phases[began]]
    return found


def _outlived(made_in: Phase, freed_in: Phase) -> bool:
    """Return whether a block has outlived the phase that made it, and was no temporary of it."""
    if made_in is Phase.FORWARD:
        return freed_in is not Phase.FORWARD
    return made_in is Phase.BACKWARD and freed_in is Phase.OPTIMIZER
