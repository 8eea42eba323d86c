"""Replays of a recording through the caching allocator: what it takes on any card that it fits.

None of it asks for a device, so that one set of replays serves all cards with one recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from memfit.allocator.replay import AllocatorOutcome, simulate_events, smallest_capacity_bytes
from memfit.allocator.settings import AllocatorSettings
from memfit.allocator.simulate import (
    CPU_RULES,
    AllocatorRules,
    Replay,
    num_setup_events,
    phase_starts,
    replay,
)
from memfit.figures import Certainty, Timeline
from memfit.prediction.peak_range import NOTICEABLE_FRACTION, PeakRange
from memfit.prediction.recording import StepRecording
from memfit.trace.events import Trace, allocations_of_step, category_names, with_sizes

_PARTS = (0.0, 1.0)
_GUESSED_PARTS = (0.0, 0.5, 1.0)
"""Where scratch is large, more of it can reserve less: backward reuses what forward took."""
_Simulation = Callable[[Sequence[int]], AllocatorOutcome]
"""Replays a recording with other sizes of its allocations."""


@dataclass(frozen=True)
class CardReplays:
    """The replays of a recording under the settings of an allocator, each made when asked for."""

    recording: StepRecording
    settings: AllocatorSettings
    recorded_for: str = ""
    """The device that was recorded; others may have the same recording."""

    @cached_property
    def outcome(self) -> AllocatorOutcome:
        """Replay what was recorded; the first window is the first step, the last the steady one."""
        return self._run(_sizes(self.recording.history))

    @cached_property
    def smallest_reserved_bytes(self) -> int:
        """Return the least reserved memory with which everything recorded survives."""
        return smallest_reserved_bytes(self.recording, self.settings)

    @cached_property
    def ranges(self) -> tuple[PeakRange, PeakRange]:
        """Return the allocated and the reserved peak with the least and the most scratch."""
        return _ranges(self.recording, self.outcome, self._run)

    @cached_property
    def guessed_ranges(self) -> tuple[PeakRange, PeakRange]:
        """Return the same where all scratch is a guess."""
        return _ranges(self.recording, self.outcome, self._run, is_guessed=True)

    @cached_property
    def steady(self) -> Trace:
        """Return the steady step with the sizes of the allocator's blocks."""
        history = self.recording.history
        places = allocations_of_step(history, self.recording.marks[-1])
        return with_sizes(
            self.recording.steady, [self.outcome.block_bytes[index] for index in places]
        )

    @cached_property
    def steady_peak(self) -> Replay:
        """Return what lives at the peak of the steady step, whose sizes are those counted."""
        return replay(self.steady, CPU_RULES)

    @cached_property
    def timeline(self) -> Timeline:
        """Return the steady step event by event."""
        return timeline_of(self.steady, CPU_RULES)

    @property
    def _run(self) -> _Simulation:
        first, last = self.recording.marks[0], self.recording.marks[-1]
        return partial(
            _simulate, self.recording, self.settings, (first.first_event, last.first_event)
        )


def replayed_peaks(
    recording: StepRecording, settings: AllocatorSettings, *, from_step: int = 0
) -> tuple[PeakRange, PeakRange]:
    """Return the allocated and the reserved peak as a program would read them at its end.

    Args:
        recording: of everything since before the model was built.
        settings: of the allocator.
        from_step: the step before which the program resets the peaks; 0 if it resets nothing.
    """
    run = _read_from(recording, settings, from_step)
    return _ranges(recording, run(_sizes(recording.history)), run)


def peaks_alone(
    recording: StepRecording, settings: AllocatorSettings, *, from_step: int = 0
) -> tuple[int, int]:
    """Return the likely ends of ``replayed_peaks``, allocated and reserved bytes, in one replay."""
    run = _read_from(recording, settings, from_step)
    window = run(_sizes(recording.history)).windows[-1]
    return window.peak_allocated_bytes, window.peak_reserved_bytes


def _read_from(
    recording: StepRecording, settings: AllocatorSettings, from_step: int
) -> _Simulation:
    """Return a replay whose last window begins where a program resets the peaks."""
    reset_at = recording.marks[from_step].first_event if from_step else 0
    return partial(_simulate, recording, settings, (reset_at,))


def smallest_reserved_bytes(recording: StepRecording, settings: AllocatorSettings) -> int:
    """Return the least reserved memory with which everything recorded survives."""
    history = recording.history
    return smallest_capacity_bytes(history.events, _sizes(history), settings, history.streams())


def _ranges(
    recording: StepRecording,
    likely: AllocatorOutcome,
    run: _Simulation,
    *,
    is_guessed: bool = False,
) -> tuple[PeakRange, PeakRange]:
    """Return the peaks of the last window as they are with the least and the most scratch."""
    history = recording.history
    outcomes = [likely]
    is_guessed = is_guessed or _is_guessed(history, likely.windows[-1].peak_allocated_bytes)
    if history.extras:
        parts = _GUESSED_PARTS if is_guessed else _PARTS
        outcomes += [run(_sizes_with(history, part)) for part in parts]
    windows = [outcome.windows[-1] for outcome in outcomes]
    allocated = [window.peak_allocated_bytes for window in windows]
    reserved = [window.peak_reserved_bytes for window in windows]
    is_shared = any(size > 1 for size in recording.group_sizes)
    kind = {"is_guessed": is_guessed, "is_shared": is_shared}
    return _range(allocated, kind), _range(reserved, kind)


def _range(values: Sequence[int], kind: Mapping[str, bool]) -> PeakRange:
    return PeakRange(likely_bytes=values[0], low_bytes=min(values), high_bytes=max(values), **kind)


def _is_guessed(history: Trace, peak_bytes: int) -> bool:
    """Return whether a kernel's guessed scratch may be a noticeable part of a peak."""
    return any(
        extra.certainty == Certainty.GUESS
        and extra.high_bytes - extra.low_bytes > NOTICEABLE_FRACTION * peak_bytes
        for extra in history.extras
    )


def _sizes_with(history: Trace, part: float) -> list[int]:
    """Return the sizes with all unknown scratch at a part of the way from its least to its most."""
    sizes = _sizes(history)
    for extra in history.extras:
        spread_bytes = extra.high_bytes - extra.low_bytes
        sizes[extra.allocation] = extra.low_bytes + int(part * spread_bytes)
    return sizes


def _simulate(
    recording: StepRecording,
    settings: AllocatorSettings,
    marks: Sequence[int],
    sizes: Sequence[int],
) -> AllocatorOutcome:
    """Replay everything since before the model was built; windows begin at the marks."""
    history = recording.history
    return simulate_events(
        history.events,
        sizes,
        streams=history.streams(),
        settings=settings,
        marks=marks,
        releases=history.releases,
    )


def _sizes(history: Trace) -> list[int]:
    return [allocation.num_bytes for allocation in history.allocations]


def timeline_of(trace: Trace, rules: AllocatorRules) -> Timeline:
    """Return allocated bytes by category, when the step begins and after each of its events."""
    num_before = num_setup_events(trace)
    changes = [
        (
            trace.allocations[index].category.value,
            (1 if delta >= 0 else -1) * rules.rounded(trace.allocations[index].num_bytes),
        )
        for index, delta in trace.deltas()
    ]
    at_start = dict.fromkeys(category_names(trace.allocations), 0)
    for category, num_bytes in changes[:num_before]:
        at_start[category] += num_bytes
    phases = [(max(0, begin - num_before), name) for begin, name in phase_starts(trace)]
    return Timeline.of(at_start, changes[num_before:], phases)
