"""What a process takes: the recorded bytes, what the allocator adds, and the libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from memfit.allocator.replay import AllocatorOutcome, simulate_events, smallest_capacity_bytes
from memfit.allocator.settings import AllocatorSettings
from memfit.allocator.simulate import (
    CPU_RULES,
    CUDA_RULES,
    AllocatorRules,
    alive_at_peak,
    peak_bytes,
)
from memfit.devices.nccl import NcclMemory, nccl_memory
from memfit.devices.spec import CUDA, ROCM, Device, Fact
from memfit.figures import Certainty, Interval, Term
from memfit.prediction.late_frees import late_interval, stages
from memfit.prediction.peak_range import NOTICEABLE_FRACTION, PeakRange
from memfit.prediction.recording import StepRecording
from memfit.trace.events import Category, Extra, Trace, allocations_of_step, with_sizes
from memfit.units import MIB

_REPLAY = "replay of the recorded step, blocks rounded to 512 bytes"
_WORKSPACES = "memfit/kernels/cuda/data/workspaces.toml"
_SIMULATION = "simulation of the caching allocator (c10/cuda/CUDACachingAllocator.cpp)"
_ON_ROCM = "Guess: the rule for CUDA, which stands in for ROCm"
_INTERPRETER_BYTES = 320 * MIB
_GUESSED_SHARE = 0.02
"""A prediction is called a guess when more than this share of it is guessed."""
_PARTS = (0.0, 1.0)
_GUESSED_PARTS = (0.0, 0.5, 1.0)
"""Where scratch is large, more of it can reserve less: backward reuses what forward took."""
_Simulation = Callable[[Sequence[int]], AllocatorOutcome]
"""Replays a recording with other sizes of its allocations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The memory of a process that trains."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    first_step_peak_bytes: int
    terms: tuple[Term, ...]
    certainty: Certainty
    fragmentation_fraction: float = 0.0
    smallest_memory_bytes: int | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    steady: Trace
    """The steady step with the sizes that the allocator counts, which add up to its peak."""

    @property
    def process_bytes(self) -> int:
        """Return the sum of the terms."""
        return sum(term.num_bytes for term in self.terms)


def rules_of(device: Device) -> AllocatorRules:
    """Return the allocator rules of a device."""
    return CUDA_RULES if device.kind == CUDA else CPU_RULES


def host_memory(recording: StepRecording) -> ProcessMemory:
    """Return what a process takes on a CPU: what was recorded, and the interpreter."""
    steady_peak_bytes = peak_bytes(recording.steady, CPU_RULES)
    terms = (
        Term(
            name="recorded step",
            num_bytes=steady_peak_bytes,
            certainty=Certainty.EXACT,
            source="replay of the recorded step",
        ),
        Term(
            name="interpreter and libraries",
            num_bytes=_INTERPRETER_BYTES,
            certainty=Certainty.GUESS,
            source="resident size of a Python process that has imported torch, typical",
        ),
    )
    memory = ProcessMemory(
        peak_allocated_bytes=steady_peak_bytes,
        peak_reserved_bytes=steady_peak_bytes,
        first_step_peak_bytes=peak_bytes(recording.first, CPU_RULES),
        terms=terms,
        certainty=Certainty.EXACT,
        steady=recording.steady,
    )
    if not stages(recording.steady):
        return memory
    late = late_interval(recording.steady, steady_peak_bytes)
    return replace(memory, certainty=Certainty.TABLE, intervals={"allocated": late})


def card_memory(
    recording: StepRecording, device: Device, settings: AllocatorSettings, *, in_full: bool
) -> ProcessMemory:
    """Replay a recording through the caching allocator and add what lies outside it.

    ``in_full`` looks for the smallest memory in which the step survives as well.
    """
    history = recording.history
    first, last = recording.marks[0], recording.marks[-1]
    run = partial(_simulate, recording, settings, (first.first_event, last.first_event))
    outcome = run(_sizes(history))
    peak, reserved = (
        outcome.windows[-1].peak_allocated_bytes,
        outcome.windows[-1].peak_reserved_bytes,
    )
    context = device.facts["context_bytes"]
    context_bytes = int(context.value)
    nccl = nccl_memory(device, recording.group_sizes)
    smallest = None
    if in_full:
        least = smallest_reserved_bytes(recording, settings)
        smallest = min(least, reserved) + context_bytes + (nccl.num_bytes if nccl else 0)
    inside = (
        *_recorded_terms(recording.steady, peak),
        Term(
            name="cached and unused",
            num_bytes=reserved - peak,
            certainty=Certainty.TABLE,
            source=_SIMULATION,
        ),
    )
    outside = Term(
        name="CUDA context and libraries",
        num_bytes=context_bytes,
        certainty=Certainty(context.certainty),
        source=context.source,
    )
    guessed_bytes = sum(t.num_bytes for t in inside if t.certainty is Certainty.GUESS)
    is_guess = guessed_bytes > _GUESSED_SHARE * sum(term.num_bytes for term in inside)
    terms = (*inside, outside, *_nccl_terms(nccl))
    is_rocm = device.platform == ROCM
    return ProcessMemory(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        first_step_peak_bytes=outcome.windows[0].peak_allocated_bytes,
        fragmentation_fraction=1 - peak / reserved if reserved else 0.0,
        smallest_memory_bytes=smallest,
        terms=tuple(map(_on_rocm, terms)) if is_rocm else terms,
        certainty=Certainty.GUESS if is_guess or is_rocm else Certainty.TABLE,
        intervals=_intervals(_ranges(recording, outcome, run, is_rocm=is_rocm), context, nccl),
        steady=with_sizes(
            recording.steady,
            [outcome.block_bytes[index] for index in allocations_of_step(history, last)],
        ),
    )


def platform_notes(device: Device) -> tuple[str, ...]:
    """Say what a prediction for a device stands on, where that is less than it looks."""
    if device.platform != ROCM:
        return ()
    note = (
        f"{device.name} runs on ROCm, of which memfit has no readings: the step is recorded with "
        "the operators of CUDA and its kernels' memory, and every figure is a guess"
    )
    return (note,)


def _on_rocm(term: Term) -> Term:
    """Take back what is known of a term on CUDA."""
    if term.certainty is Certainty.GUESS:
        return term
    source = f"{_ON_ROCM}: {term.source}"
    return replace(term, certainty=Certainty.GUESS, source=source)


def _nccl_terms(nccl: NcclMemory | None) -> Iterator[Term]:
    """Yield what NCCL takes, where ranks talk to each other."""
    if nccl is not None:
        yield Term(
            name="NCCL",
            num_bytes=nccl.num_bytes,
            certainty=nccl.certainty,
            source=nccl.source,
        )


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
    guess = Certainty.GUESS if "guess" in certainties else Certainty.TABLE
    sources = "; ".join(sorted({extra.source for _, extra in hidden})) or "none at the peak"
    rows = (
        ("tensors of the step", tensors, Certainty.EXACT, _REPLAY),
        ("cuBLAS workspaces", workspaces, Certainty.TABLE, _WORKSPACES),
        ("kernel scratch", scratch, guess, sources),
        ("blocks larger than asked for", rounding, Certainty.TABLE, _SIMULATION),
    )
    return tuple(
        Term(name=name, num_bytes=num_bytes, certainty=certainty, source=source)
        for name, num_bytes, certainty, source in rows
        if num_bytes
    )


def _intervals(
    ranges: tuple[PeakRange, PeakRange], context: Fact, nccl: NcclMemory | None
) -> dict[str, Interval]:
    """Return the intervals: replays with the least and the most scratch, widened by the margins."""
    allocated, reserved = ranges
    process = reserved.plus(int(context.value), Certainty(context.certainty))
    if nccl is not None:
        process = process.plus_between(nccl.num_bytes, nccl.low_bytes, nccl.high_bytes)
    return {
        "allocated": allocated.interval("allocated"),
        "reserved": reserved.interval("reserved"),
        "process": process.interval("process"),
    }


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
    is_rocm: bool = False,
) -> tuple[PeakRange, PeakRange]:
    """Return the peaks of the last window as they are with the least and the most scratch."""
    history = recording.history
    outcomes = [likely]
    is_guessed = is_rocm or _is_guessed(history, likely.windows[-1].peak_allocated_bytes)
    if history.extras:
        parts = _GUESSED_PARTS if is_guessed else _PARTS
        outcomes += [run(_sizes_with(history, part)) for part in parts]
    windows = [outcome.windows[-1] for outcome in outcomes]
    allocated = [window.peak_allocated_bytes for window in windows]
    return (
        _range(allocated, is_guessed=is_guessed),
        _range([window.peak_reserved_bytes for window in windows], is_guessed=is_guessed),
    )


def _range(values: Sequence[int], *, is_guessed: bool) -> PeakRange:
    return PeakRange(
        likely_bytes=values[0],
        low_bytes=min(values),
        high_bytes=max(values),
        is_guessed=is_guessed,
    )


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
