"""Replays a trace under an allocator's rules: timeline, peak, and what lives at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memfit.trace.events import Allocation, Phase, Trace, category_names


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorRules:
    """How an allocator rounds."""

    granularity_bytes: int
    """Every block is rounded up to a multiple of this."""

    def rounded(self, num_bytes: int) -> int:
        """Round a request up to what the allocator counts."""
        return -(-num_bytes // self.granularity_bytes) * self.granularity_bytes


CPU_RULES = AllocatorRules(granularity_bytes=1)
"""The CPU allocator reports what was asked for (c10/core/CPUAllocator.cpp, torch 2.13)."""
CUDA_RULES = AllocatorRules(granularity_bytes=512)
"""kMinBlockSize of the caching allocator (c10/cuda/CUDACachingAllocator.cpp, torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The outcome of replaying one trace."""

    peak_allocated_bytes: int
    peak_event: int
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    largest: Sequence[tuple[int, Allocation]]
    """Up to ten blocks alive at the peak, largest first, with their rounded bytes."""


def peak_bytes(trace: Trace, rules: AllocatorRules) -> int:
    """Return the peak of a trace and nothing else."""
    return _find_peak(trace, rules)[0]


def replay(trace: Trace, rules: AllocatorRules) -> Replay:
    """Replay a trace and describe its peak. Cost: one pass over the events, twice."""
    peak, peak_event = _find_peak(trace, rules)
    alive = _alive_at(trace, peak_event)
    by_category = dict.fromkeys(category_names(trace.allocations), 0)
    by_module: dict[str, int] = {}
    blocks = []
    for index in alive:
        allocation = trace.allocations[index]
        num_bytes = rules.rounded(allocation.num_bytes)
        by_category[allocation.category.value] += num_bytes
        by_module[allocation.module] = by_module.get(allocation.module, 0) + num_bytes
        blocks.append((num_bytes, allocation))
    blocks.sort(key=lambda block: -block[0])
    return Replay(
        peak_allocated_bytes=peak,
        peak_event=peak_event,
        by_category=by_category,
        by_module=dict(sorted(by_module.items(), key=lambda item: -item[1])),
        largest=blocks[:10],
    )


def alive_at_peak(trace: Trace, rules: AllocatorRules) -> list[tuple[int, int]]:
    """Return the allocations that live at the peak, with their rounded bytes."""
    _, peak_event = _find_peak(trace, rules)
    return [
        (index, rules.rounded(trace.allocations[index].num_bytes))
        for index in sorted(_alive_at(trace, peak_event))
    ]


def _find_peak(trace: Trace, rules: AllocatorRules) -> tuple[int, int]:
    """Find the highest total and the event that reaches it."""
    current = peak = peak_event = 0
    sizes = [rules.rounded(allocation.num_bytes) for allocation in trace.allocations]
    for position, event in enumerate(trace.events):
        if event >= 0:
            current += sizes[event]
            if current > peak:
                peak, peak_event = current, position
        else:
            current -= sizes[-1 - event]
    return peak, peak_event


def _alive_at(trace: Trace, last_event: int) -> set[int]:
    """Return the allocations that live right after an event."""
    alive: set[int] = set()
    for event in trace.events[: last_event + 1]:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(-1 - event)
    return alive


def num_setup_events(trace: Trace) -> int:
    """Count the events, at the beginning, that say what lives when the step begins."""
    for position, event in enumerate(trace.events):
        if event < 0 or trace.allocations[event].phase is not Phase.SETUP:
            return position
    return len(trace.events)


def phase_starts(trace: Trace) -> list[tuple[int, str]]:
    """Get ``(event, phase)`` wherever an allocation of another phase than the last one begins."""
    starts: list[tuple[int, str]] = []
    current = Phase.SETUP
    for position, event in enumerate(trace.events):
        if event < 0:
            continue
        phase = trace.allocations[event].phase
        if phase is not current:
            starts.append((position, phase.value))
            current = phase
    return starts
