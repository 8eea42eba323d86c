"""Predicts what a recorded script takes in each phase of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from memfit.allocator.replay import simulate_events
from memfit.allocator.settings import AllocatorSettings
from memfit.allocator.simulate import CPU_RULES, peak_bytes
from memfit.devices.spec import CUDA, Device
from memfit.figures import BOUNDED_FIGURES, Answer, Prediction
from memfit.peak_changes.moments import StepMoments
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.lives import Life, lives_of
from memfit.prediction.predict import evaluate_steps
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import StepRecording
from memfit.prediction.step_moments import step_moments
from memfit.script.data_prediction import (
    DataForecast,
    DataPrediction,
    without_handed_steps,
)
from memfit.script.question import Refused, ScriptRecording, Span
from memfit.script.steps import EVALUATION, OTHER, STEADY_STEP
from memfit.trace.events import Trace, history_until, trace_of_step


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """What one phase of a run takes: on the device, and on the host beside a card."""

    phase: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    host_peak_bytes: int
    """Of torch's tensors on the host; 0 on ``cpu``, where the host is the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPrediction:
    """What a script would take: its steady step in full, and the peaks of its phases."""

    script: str
    prediction: Prediction
    moments: StepMoments
    """What lives where each phase of the steady step is highest."""
    phases: Sequence[PhasePeak]
    step_peaks_bytes: Sequence[int]
    """Allocated, of each recorded step in order: batches of other lengths take other bytes."""
    answers: Sequence[Answer] = ()
    refused: Sequence[Refused] = ()
    num_diverted_files: int = 0
    diverted_bytes: int = 0
    skewed: Prediction | None = None
    """The steady step with routing and masks as uneven as can be; None where no size rests on
    values that nobody knows."""
    data: DataPrediction | None = None
    """The whole of its training data; None where that was not asked for."""
    lives: Callable[[], Sequence[Life]] = tuple
    """Gives the lives of the steady step's blocks."""

    @property
    def worst(self) -> PhasePeak:
        """Return the phase with the highest bounded figure."""
        name = BOUNDED_FIGURES[self.prediction.budget_of]
        return max(self.phases, key=lambda phase: int(getattr(phase, name)))

    @property
    def worst_bytes(self) -> int:
        """Return the bounded figure of that phase, and of the largest batch of the data."""
        figure = BOUNDED_FIGURES[self.prediction.budget_of]
        worst_bytes: int = getattr(self.worst, figure)
        if self.data is not None and self.data.largest is not None:
            worst_bytes = max(worst_bytes, getattr(self.data.largest, figure))
        return worst_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the steady step's fields, and beside them what is known of the script."""
        return {
            **self.prediction.to_json(),
            "script": self.script,
            "phases": [asdict(phase) for phase in self.phases],
            "worst_phase": self.worst.phase,
            "step_peaks_bytes": list(self.step_peaks_bytes),
            "answers": [asdict(answer) for answer in self.answers],
            "refused_outside": [asdict(each) for each in self.refused],
            "num_diverted_files": self.num_diverted_files,
            "diverted_bytes": self.diverted_bytes,
            "skewed_peak_bytes": None if self.skewed is None else self.skewed.bounded_bytes(),
            "data": None if self.data is None else self.data.to_json(),
        }


def predict_recorded_script(
    script: str,
    found: ScriptRecording,
    device: Device,
    *,
    budget: MemoryBudget | None = None,
    settings: AllocatorSettings | None = None,
    skewed: ScriptRecording | None = None,
) -> ScriptPrediction:
    """Turn the recording of a script into a prediction.

    The steady step is the one with the highest peak of those recorded after the first. Whether it
    fits is judged by the worst phase.

    Args:
        script: how the script was started.
        found: what was recorded of it.
        device: what it was recorded for.
        budget: which every phase has to hold.
        settings: of the caching allocator.
        skewed: the recording with uneven routing, where there is one.
    """
    settings = settings or AllocatorSettings()
    scanned, found = found, without_handed_steps(found)
    steady = _up_to_largest_step(found.recording)
    prediction = evaluate_steps(steady, device, budget=budget, settings=settings, in_full=True)
    context_bytes = prediction.process_bytes - prediction.peak_reserved_bytes
    phases = phase_peaks(found, device, settings, context_bytes)
    uneven = None
    if skewed is not None:
        largest = _up_to_largest_step(skewed.recording)
        uneven = evaluate_steps(largest, device, budget=budget, settings=settings)
    answer = ScriptPrediction(
        script=script,
        prediction=prediction,
        moments=step_moments(steady, device),
        phases=phases,
        step_peaks_bytes=step_peaks(found.recording, device),
        answers=found.answers,
        refused=found.refused,
        num_diverted_files=len(found.diverted),
        diverted_bytes=sum(each.num_bytes for each in found.diverted),
        skewed=uneven,
        data=_over_data(scanned, device, settings, context_bytes),
        lives=partial(lives_of, steady, device),
    )
    notes = (*prediction.notes, *_notes(answer, found))
    is_bound = not found.is_whole and all(each.phase != STEADY_STEP for each in phases)
    fits = None if is_bound and _fits(answer) else _fits(answer)
    return replace(answer, prediction=replace(prediction, notes=notes, fits=fits))


def _over_data(
    found: ScriptRecording, device: Device, settings: AllocatorSettings, context_bytes: int
) -> DataPrediction | None:
    """Look at the whole of the training data, where it was scanned."""
    if found.data is None:
        return None
    return DataForecast(found, found.data, device, settings, context_bytes).prediction()


def _fits(answer: ScriptPrediction) -> bool | None:
    """Judge a budget by the worst phase."""
    budget_bytes = answer.prediction.budget_bytes
    if answer.prediction.fits is None or budget_bytes is None:
        return answer.prediction.fits
    figure = BOUNDED_FIGURES[answer.prediction.budget_of]
    worst_bytes = getattr(answer.worst, figure)
    if answer.data is not None and answer.data.largest is not None:
        worst_bytes = max(worst_bytes, getattr(answer.data.largest, figure))
        if not all(each.survived for each in answer.data.sequence.values() if each.is_as_set):
            return False
    if answer.skewed is not None:
        worst_bytes = max(worst_bytes, answer.skewed.bounded_bytes())
    return bool(answer.prediction.fits and worst_bytes <= budget_bytes)


def _up_to_largest_step(recording: StepRecording) -> StepRecording:
    """Drop what comes after the largest of the steps that follow the first."""
    history, marks = recording.history, recording.marks
    later = list(marks[1:]) or list(marks)

    largest = max(later, key=lambda mark: peak_bytes(trace_of_step(history, mark), CPU_RULES))
    kept = [mark for mark in marks if mark.last_event <= largest.last_event]
    return replace(recording, history=history_until(history, largest), marks=kept)


def step_peaks(recording: StepRecording, device: Device) -> Sequence[int]:
    """Return the allocated peak of each step."""
    history, rules = recording.history, rules_of(device)
    return [peak_bytes(trace_of_step(history, mark), rules) for mark in recording.marks]


def phase_peaks(
    found: ScriptRecording, device: Device, settings: AllocatorSettings, context_bytes: int
) -> Sequence[PhasePeak]:
    """Return the highest peaks of each phase, in the order in which the phases first came.

    Args:
        found: the recording, with its phases.
        device: where it is replayed.
        settings: of the caching allocator.
        context_bytes: what a process takes besides what its allocator reserves.
    """
    history = found.recording.history
    if device.kind == CUDA:
        peaks = _card_peaks(history, found.spans, settings)
    else:
        peaks = [(peak, peak) for peak in _host_peaks(history, found.spans)]
    highest: dict[str, PhasePeak] = {}
    for span, (seen_bytes, seen_reserved_bytes) in zip(found.spans, peaks, strict=True):
        allocated = seen_bytes + _kept_by_steps(found, span)
        reserved = max(seen_reserved_bytes, allocated)
        here = PhasePeak(
            phase=span.phase,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=reserved,
            process_bytes=reserved + context_bytes,
            host_peak_bytes=span.host_peak_bytes,
        )
        before = highest.get(span.phase)
        highest[span.phase] = here if before is None else _higher(before, here)
    return [phase for name, phase in highest.items() if name != OTHER]


def _kept_by_steps(found: ScriptRecording, span: Span) -> int:
    """Return what steps add to an evaluation that was seen before them and not after them.

    Frameworks try the evaluation before they train; later, optimizer states and gradients lie there
    as well.
    """
    last = found.recording.marks[-1]
    evaluations = [each for each in found.spans if each.phase == EVALUATION]
    is_before = span in evaluations and span.last_event <= found.recording.marks[0].last_event
    if not is_before or any(each.first_event >= last.last_event for each in evaluations):
        return 0
    history = found.recording.history
    made: dict[int, int] = {}
    for event in history.events[span.last_event : last.last_event]:
        if event >= 0:
            made[event] = history.allocations[event].num_bytes
        else:
            made.pop(-1 - event, None)
    return sum(made.values())


def _higher(one: PhasePeak, other: PhasePeak) -> PhasePeak:
    """Return the highest figures of two stretches of one phase."""
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "process_bytes", "host_peak_bytes")
    figures: Mapping[str, int] = {
        name: max(getattr(one, name), getattr(other, name)) for name in names
    }
    return PhasePeak(phase=one.phase, **figures)


def _card_peaks(
    history: Trace, spans: Sequence[Span], settings: AllocatorSettings
) -> list[tuple[int, int]]:
    outcome = simulate_events(
        history.events,
        [allocation.num_bytes for allocation in history.allocations],
        streams=history.streams(),
        settings=settings,
        marks=[span.first_event for span in spans],
        releases=history.releases,
    )
    return [(each.peak_allocated_bytes, each.peak_reserved_bytes) for each in outcome.windows]


def _host_peaks(history: Trace, spans: Sequence[Span]) -> list[int]:
    """Return the highest sum of what lives in each span, of which none overlap."""
    peaks = []
    deltas = history.deltas()
    current = position = 0
    for span in spans:
        while position < span.first_event:
            current += next(deltas)[1]
            position += 1
        peak = current
        while position < span.last_event:
            current += next(deltas)[1]
            position += 1
            peak = max(peak, current)
        peaks.append(peak)
    return peaks


def _notes(answer: ScriptPrediction, found: ScriptRecording) -> Sequence[str]:
    """Say what the user of a script should know, a sentence each."""
    notes = list(found.notes)
    seen = {phase.phase for phase in answer.phases}
    if STEADY_STEP not in seen:
        notes.append("Only one step was recorded; a steady one may take more")
    if found.missing:
        notes.append(
            f"Not reached while it was recorded: {', '.join(found.missing)}; more --steps may"
        )
    if not found.draws_are_true:
        notes.append(
            "Too many random numbers to draw them all: data may be shuffled another way than in "
            "a run with the same seed"
        )
    return notes
