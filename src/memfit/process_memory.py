"""What a process takes on a GPU: the recorded bytes, what the allocator adds, and the libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.allocator.outcome import AllocatorOutcome, simulate_events, smallest_capacity_bytes
from memfit.allocator.settings import AllocatorSettings
from memfit.allocator.simulate import CUDA_RULES, alive_at_peak
from memfit.devices.spec import Device
from memfit.figures import Certainty, Interval, Term
from memfit.recording import StepRecording
from memfit.trace.events import Category, Extra, Trace

# How far measured figures lie from predicted ones, 19 times out of 20: the readings of
# docs/accuracy.md. Fragmentation differs by more than a tenth between identical runs there.
_MARGINS = {"allocated": 0.02, "reserved": 0.12, "process": 0.12}
_SIMULATION = "simulation of the caching allocator (c10/cuda/CUDACachingAllocator.cpp)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """The memory of a process on a GPU."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    first_step_peak_bytes: int
    fragmentation_fraction: float
    smallest_memory_bytes: int | None
    terms: tuple[Term, ...]
    intervals: Mapping[str, Interval]


def card_memory(
    recording: StepRecording, device: Device, settings: AllocatorSettings, *, in_full: bool
) -> CardMemory:
    """Replay a recording through the caching allocator and add what lies outside it.

    ``in_full`` looks for the smallest memory in which the step survives as well.
    """
    history = recording.history
    outcome = _simulate(recording, settings, _sizes(history))
    peak, reserved = (
        outcome.windows[-1].peak_allocated_bytes,
        outcome.windows[-1].peak_reserved_bytes,
    )
    context = device.facts["context_bytes"]
    context_bytes = int(context.value)
    smallest = None
    if in_full:
        least = smallest_capacity_bytes(history.events, _sizes(history), settings)
        smallest = min(least, reserved) + context_bytes
    terms = (
        *_recorded_terms(recording.steady, peak),
        Term(
            name="cached and unused",
            num_bytes=reserved - peak,
            certainty=Certainty.TABLE,
            source=_SIMULATION,
        ),
        Term(
            name="CUDA context and libraries",
            num_bytes=context_bytes,
            certainty=Certainty(context.certainty),
            source=context.source,
        ),
    )
    return CardMemory(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        first_step_peak_bytes=outcome.windows[0].peak_allocated_bytes,
        fragmentation_fraction=1 - peak / reserved if reserved else 0.0,
        smallest_memory_bytes=smallest,
        terms=terms,
        intervals=_intervals(recording, settings, outcome, context_bytes),
    )


def _simulate(
    recording: StepRecording, settings: AllocatorSettings, sizes: Sequence[int]
) -> AllocatorOutcome:
    """Replay everything since before the model was built; windows are the first and last step."""
    first, last = recording.marks[0], recording.marks[-1]
    return simulate_events(
        recording.history.events,
        sizes,
        settings=settings,
        marks=(first.first_event, last.first_event),
        releases=recording.history.releases,
    )


def _sizes(history: Trace) -> list[int]:
    return [allocation.num_bytes for allocation in history.allocations]


def _recorded_terms(steady: Trace, peak_bytes: int) -> tuple[Term, ...]:
    """Split the allocated peak into tensors, workspaces, scratch and what rounding adds."""
    extras = {extra.allocation: extra for extra in steady.extras}
    tensors = workspaces = 0
    hidden: list[tuple[int, Extra]] = []
    for index, num_bytes in alive_at_peak(steady, CUDA_RULES):
        if index in extras:
            hidden.append((num_bytes, extras[index]))
        elif steady.allocations[index].category is Category.WORKSPACES:
            workspaces += num_bytes
        else:
            tensors += num_bytes
    scratch = sum(num_bytes for num_bytes, _ in hidden)
    certainties = {extra.certainty for _, extra in hidden}
    rounding = peak_bytes - tensors - workspaces - scratch
    terms = (
        Term(
            name="tensors of the step",
            num_bytes=tensors,
            certainty=Certainty.EXACT,
            source="replay of the recorded step, blocks rounded to 512 bytes",
        ),
        Term(
            name="cuBLAS workspaces",
            num_bytes=workspaces,
            certainty=Certainty.TABLE,
            source="memfit/trace/cuda/data/workspaces.toml",
        ),
        Term(
            name="kernel scratch",
            num_bytes=scratch,
            certainty=Certainty.GUESS if "guess" in certainties else Certainty.TABLE,
            source="; ".join(sorted({extra.source for _, extra in hidden})) or "none at the peak",
        ),
        Term(
            name="blocks larger than asked for",
            num_bytes=rounding,
            certainty=Certainty.TABLE,
            source=_SIMULATION,
        ),
    )
    return tuple(term for term in terms if term.num_bytes)


def _intervals(
    recording: StepRecording,
    settings: AllocatorSettings,
    likely: AllocatorOutcome,
    context_bytes: int,
) -> dict[str, Interval]:
    """Give the intervals: replays with the least and the most scratch, widened by the margins."""
    history = recording.history
    low = high = likely
    if history.extras:
        low = _simulate(recording, settings, _sizes_with(history, is_high=False))
        high = _simulate(recording, settings, _sizes_with(history, is_high=True))
    outcomes = (low, likely, high)
    peaks = [outcome.windows[-1].peak_allocated_bytes for outcome in outcomes]
    reserved = [outcome.windows[-1].peak_reserved_bytes for outcome in outcomes]
    process = [num_bytes + context_bytes for num_bytes in reserved]
    figures = {"allocated": peaks, "reserved": reserved, "process": process}
    return {
        name: Interval(
            low_bytes=int(min(values) * (1 - _MARGINS[name])),
            high_bytes=int(max(values) * (1 + _MARGINS[name])),
        )
        for name, values in figures.items()
    }


def _sizes_with(history: Trace, *, is_high: bool) -> list[int]:
    sizes = _sizes(history)
    for extra in history.extras:
        sizes[extra.allocation] = extra.high_bytes if is_high else extra.low_bytes
    return sizes
