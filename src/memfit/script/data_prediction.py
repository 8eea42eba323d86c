"""Predicts what a script takes over the whole of its data, from the steps of a few batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from memfit.allocator.replay import simulate_events
from memfit.allocator.settings import AllocatorSettings
from memfit.devices.spec import CUDA, Device
from memfit.prediction.process_memory import rules_of
from memfit.script.question import ScriptRecording, Span
from memfit.script.scanned_data import ScannedData
from memfit.script.shapes_replay import (
    SequenceOutcome,
    StepSequence,
    Sum,
    peaks_of,
    replay_sequence,
)
from memfit.script.step_sizes import BEYOND, FITTED, NEAREST, RECORDED, SizedStep, StepSizes
from memfit.script.step_templates import StepTemplate, templates
from memfit.script.steps import STEADY_STEP
from memfit.session.batch_shapes import BatchShape

LARGEST_BATCH = "largest batch"
_QUANTILES = {"50 %": 0.5, "90 %": 0.9, "99 %": 0.99, "99.9 %": 0.999, "100 %": 1.0}
_MOST_STEPS = 2000
_MOST_SECONDS = 25.0
"""For one of two replays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatchPeak:
    """The batch of the highest predicted peak, and what its step takes."""

    position: int
    """In the epoch, from 0."""
    shapes: Sequence[str]
    peak_allocated_bytes: int
    """Of its own recorded step."""
    peak_reserved_bytes: int
    process_bytes: int
    steady_peak_bytes: int
    """Allocated, of the highest step that was recorded without looking for it."""
    is_recorded: bool
    """Whether its own step was recorded; else its allocated peak follows from others'."""
    is_confirmed: bool
    """Whether a module of that step was called with a tensor of the batch's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPrediction:
    """What the batches of an epoch take."""

    num_batches: int
    is_complete: bool
    num_shapes: int
    scan_seconds: float
    largest: LargestBatchPeak | None = None
    quantiles_bytes: Mapping[str, int]
    """Of the allocated peaks of the epoch's steps."""
    sequence: Mapping[str, SequenceOutcome]
    """Of consecutive steps in the caching allocator, by its setting; empty on ``cpu``."""
    first_replayed: int = 0
    """The position of the batch with which the sequence begins."""
    method: Mapping[str, int]
    """How many of the epoch's steps are known in which way."""
    fitted_fraction: float = 0.0
    """Of the bytes in fitted steps, those that a polynomial gives to the byte."""
    num_not_recorded: int = 0
    reason: str = ""
    """Why nothing was found, or less than everything."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


class DataForecast:
    """Put together what is known of an epoch's steps.

    Args:
        found: the recording, with a scan.
        data: the scan.
        device: what it was recorded for.
        settings: of the caching allocator.
        context_bytes: what a process takes besides what its allocator reserves.
    """

    def __init__(
        self,
        found: ScriptRecording,
        data: ScannedData,
        device: Device,
        settings: AllocatorSettings,
        context_bytes: int,
    ) -> None:
        self._recording, self._data, self._device = found.recording, data, device
        self._settings, self._context_bytes = settings, context_bytes
        self._before = self._recording.marks[data.num_steps_before - 1]

    def prediction(self) -> DataPrediction:
        """Predict the peaks of the epoch, and what becomes of the allocator."""
        data = self._data
        known = DataPrediction(
            num_batches=len(data.order),
            is_complete=data.is_complete,
            num_shapes=len(data.shapes),
            scan_seconds=data.scan_seconds,
            quantiles_bytes={},
            sequence={},
            method={},
            num_not_recorded=data.num_not_recorded,
            reason=data.reason,
        )
        if not data.recorded:
            return known
        peaks = self._peaks()
        worst = self._worst(peaks)
        first = max(0, min(worst + 1, len(peaks)) - _MOST_STEPS)
        methods = Counter(self._sized[shape].method for shape in data.order)
        return replace(
            known,
            largest=self._largest(worst, peaks[worst]),
            quantiles_bytes=_quantiles(peaks),
            sequence=self._sequences(first),
            first_replayed=first,
            method={name: methods[name] for name in (RECORDED, FITTED, NEAREST, BEYOND)},
            fitted_fraction=self._sizes.fraction_fitted(),
        )

    @cached_property
    def _templates(self) -> list[StepTemplate]:
        return templates(self._recording.history, self._recording.marks)

    @cached_property
    def _sizes(self) -> StepSizes:
        return StepSizes(self._data, self._templates)

    @cached_property
    def _sized(self) -> list[SizedStep]:
        return [self._sizes.of(shape) for shape in range(len(self._data.shapes))]

    def _begin(self, blocks: Any) -> StepSequence:
        steps = self._templates[: self._data.num_steps_before]
        return StepSequence(self._recording.history, self._before, steps, blocks)

    def _peaks(self) -> list[int]:
        """Return the allocated peak of each step of the epoch."""
        blocks = Sum(rules_of(self._device))
        steps = [self._sized[shape] for shape in self._data.order]
        return peaks_of(self._begin(blocks), blocks, steps)

    def _worst(self, peaks: Sequence[int]) -> int:
        """Return the batch of the highest peak; a peak that stands in for another is not its own.

        A batch larger than all that were recorded comes first: nobody knows its peak.
        """
        beyond = {number for number, each in enumerate(self._sized) if each.method == BEYOND}
        own = {number for number, each in enumerate(self._sized) if each.method != NEAREST}
        order = self._data.order
        choice = [place for place, shape in enumerate(order) if shape in (beyond or own)]
        sizes = [_num_elements(self._data.shapes[order[place]]) for place in choice]
        ranked = zip((peaks[place] for place in choice), sizes, choice, strict=True)
        return max(ranked, key=lambda each: each[:2])[2]

    def _largest(self, position: int, predicted_bytes: int) -> LargestBatchPeak:
        """Describe the largest batch by its own step, where that was recorded."""
        shape = self._data.order[position]
        own = next((each for each in self._data.recorded if each.shape == shape), None)
        allocated = reserved = predicted_bytes
        if own is not None:
            allocated, reserved = self._recorded_peaks(own.step)
        return LargestBatchPeak(
            position=position,
            shapes=words_of(self._data.shapes[shape]),
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            process_bytes=reserved + self._context_bytes,
            steady_peak_bytes=self._steady_peak(),
            is_recorded=own is not None,
            is_confirmed=own is not None and own.is_confirmed,
        )

    def _steady_peak(self) -> int:
        marks = self._recording.marks[: self._data.num_steps_before]
        return max(self._recorded_peaks(step)[0] for step in range(len(marks))[1:] or [0])

    def _recorded_peaks(self, step: int) -> tuple[int, int]:
        """Return the allocated and the reserved peak of a recorded step."""
        history, mark = self._recording.history, self._recording.marks[step]
        if self._device.kind != CUDA:
            highest = current = 0
            for place, (_, change) in enumerate(history.deltas()):
                current += change
                if mark.first_event <= place < mark.last_event:
                    highest = max(highest, current)
            return highest, highest
        outcome = simulate_events(
            history.events[: mark.last_event],
            [allocation.num_bytes for allocation in history.allocations],
            streams=history.streams(),
            settings=self._settings,
            marks=[mark.first_event],
            releases=[place for place in history.releases if place <= mark.last_event],
        )
        return outcome.windows[-1].peak_allocated_bytes, outcome.windows[-1].peak_reserved_bytes

    def _sequences(self, first: int) -> dict[str, SequenceOutcome]:
        """Replay consecutive steps of the epoch, from the first again after the last."""
        if self._device.kind != CUDA:
            return {}
        order = [*self._data.order[first:], *self._data.order[:first]]
        times = -(-_MOST_STEPS // len(order))
        steps = [self._sized[shape] for shape in (order * times)[:_MOST_STEPS]]
        memory_bytes = self._device.memory_bytes
        capacity = memory_bytes - self._context_bytes if memory_bytes else None
        replay = partial(
            replay_sequence,
            self._begin,
            steps,
            capacity_bytes=capacity,
            most_seconds=_MOST_SECONDS,
        )
        found = {}
        for name, is_expandable in (("default", False), ("expandable_segments", True)):
            outcome = replay(settings=replace(self._settings, expandable_segments=is_expandable))
            is_as_set = is_expandable == self._settings.expandable_segments
            found[name] = replace(outcome, is_as_set=is_as_set)
        return found


def _num_elements(shape: BatchShape) -> int:
    return sum(prod(sizes) for sizes, _ in shape)


def words_of(shape: BatchShape) -> list[str]:
    """Write the shapes of a batch's tensors, as in ``int64[8, 1022]``."""
    return [f"{kind}{list(sizes)}" for sizes, kind in shape]


def without_handed_steps(found: ScriptRecording) -> ScriptRecording:
    """Return a recording that ends, as far as its steady step goes, where the scan began.

    The steps of batches that were handed on become a phase of their own.
    """
    data = found.data
    if data is None or not data.recorded:
        return found
    marks = found.recording.marks
    begins = marks[data.num_steps_before - 1].last_event
    spans = [_renamed(span) if span.first_event >= begins else span for span in found.spans]
    kept = marks[: data.num_steps_before]
    return replace(found, spans=spans, recording=replace(found.recording, marks=kept))


def _renamed(span: Span) -> Span:
    return replace(span, phase=LARGEST_BATCH) if span.phase == STEADY_STEP else span


def _quantiles(peaks: Sequence[int]) -> dict[str, int]:
    """Return the smallest peaks that a share of the steps does not exceed."""
    ordered = sorted(peaks)
    last = len(ordered) - 1
    return {name: ordered[round(part * last)] for name, part in _QUANTILES.items()}
