"""What a process takes: the recorded bytes, what the allocator adds, and the libraries."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from memfit.allocator.simulate import (
    CPU_RULES,
    CUDA_RULES,
    AllocatorRules,
    alive_at_peak,
    peak_bytes,
)
from memfit.devices.nccl import NcclMemory, nccl_memory
from memfit.devices.spec import CPU, CUDA, ROCM, Device, Fact
from memfit.figures import Certainty, Interval, Term
from memfit.kernels.cpu import unknown_kernel_notes
from memfit.prediction.card_replays import CardReplays
from memfit.prediction.peak_range import PeakRange
from memfit.prediction.recording import StepRecording
from memfit.trace.events import Category, Extra, Trace
from memfit.units import MIB

_REPLAY = "replay of the recorded step, blocks rounded to 512 bytes"
_WORKSPACES = "memfit/kernels/cuda/data/workspaces.toml"
_SIMULATION = "simulation of the caching allocator (c10/cuda/CUDACachingAllocator.cpp)"
_ON_ROCM = "Guess: the rule for CUDA, which stands in for ROCm"
_INTERPRETER_BYTES = 320 * MIB
_GUESSED_SHARE = 0.02
"""A prediction is called a guess when more than this share of it is guessed."""
_MOST_HELD = 1
"""How many copies may live besides that of the next collective. Source: the allocator's events of
ranks over gloo on two busy cores, ``free_peak_bytes`` of benchmarks/results/ranks.json."""


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
    if not any(each.category is Category.GLOO_STAGING for each in recording.steady.allocations):
        return memory
    # A collective ends when its result is there. What it has staged is freed by whoever lets go of
    # it last: the rank itself, or a thread of gloo's that may come later, on cores that are busy.
    late = Interval(
        low_bytes=steady_peak_bytes, high_bytes=peak_bytes(_freed_late(recording.steady), CPU_RULES)
    )
    return replace(memory, certainty=Certainty.TABLE, intervals={"allocated": late})


def card_memory(replays: CardReplays, device: Device, *, in_full: bool) -> ProcessMemory:
    """Add to what a recording takes in the caching allocator what lies outside it on a device.

    ``in_full`` looks for the smallest memory in which the step survives as well.
    """
    recording = replays.recording
    first, last = replays.outcome.windows
    peak, reserved = last.peak_allocated_bytes, last.peak_reserved_bytes
    context = device.facts["context_bytes"]
    context_bytes = int(context.value)
    nccl = nccl_memory(device, recording.group_sizes)
    smallest = None
    if in_full:
        least = min(replays.smallest_reserved_bytes, reserved)
        smallest = least + context_bytes + (nccl.num_bytes if nccl else 0)
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
    ranges = replays.guessed_ranges if is_rocm else replays.ranges
    return ProcessMemory(
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        first_step_peak_bytes=first.peak_allocated_bytes,
        fragmentation_fraction=1 - peak / reserved if reserved else 0.0,
        smallest_memory_bytes=smallest,
        terms=tuple(map(_on_rocm, terms)) if is_rocm else terms,
        certainty=Certainty.GUESS if is_guess or is_rocm else Certainty.TABLE,
        intervals=_intervals(ranges, context, nccl),
        steady=replays.steady,
    )


def bounded_bytes(replays: CardReplays, device: Device, budget_of: str) -> int:
    """Return ``allocated``, ``reserved`` or ``process`` bytes of a steady step on a card."""
    window = replays.outcome.windows[-1]
    if budget_of == "allocated":
        return window.peak_allocated_bytes
    if budget_of == "reserved":
        return window.peak_reserved_bytes
    nccl = nccl_memory(device, replays.recording.group_sizes)
    beside_bytes = device.value("context_bytes") + (nccl.num_bytes if nccl else 0)
    return window.peak_reserved_bytes + int(beside_bytes)


def platform_notes(device: Device, steady: Trace) -> tuple[str, ...]:
    """Say what a prediction for a device stands on, where that is less than it looks."""
    if device.kind == CPU:
        return unknown_kernel_notes((each.name, each.dtype) for each in steady.operations)
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
    return {
        "allocated": allocated.interval("allocated"),
        "reserved": reserved.interval("reserved"),
        "process": process_range(reserved, context, nccl).interval("process"),
    }


def process_range(reserved: PeakRange, context: Fact, nccl: NcclMemory | None) -> PeakRange:
    """Add to reserved memory what a process holds outside the allocator."""
    process = reserved.plus(int(context.value), Certainty(context.certainty))
    if nccl is not None:
        process = process.plus_between(nccl.num_bytes, nccl.low_bytes, nccl.high_bytes)
    return process


def _freed_late(trace: Trace) -> Trace:
    """Have each staged copy live until so many later ones have been made."""
    events: list[int] = []
    held: deque[int] = deque()
    for event in trace.events:
        staged = trace.allocations[max(event, -1 - event)].category is Category.GLOO_STAGING
        if staged and event < 0:
            held.append(event)
            continue
        events.append(event)
        while staged and len(held) > _MOST_HELD:
            events.append(held.popleft())
    return replace(trace, events=[*events, *held])
