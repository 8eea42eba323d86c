"""What a rank takes where gloo's threads free late what they have staged.

A collective ends when its result is there. What it has staged is freed by whoever lets go of it
last: the rank itself, or a thread of gloo's that may come later, on cores that are busy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from memfit.allocator.simulate import CPU_RULES, peak_bytes
from memfit.figures import Interval
from memfit.trace.events import Category, Trace

_MOST_HELD = 1
"""How many copies may live besides that of the next collective. Source: the allocator's events of
ranks over gloo on two busy cores, ``free_peak_bytes`` of benchmarks/results/ranks.json."""


def stages(trace: Trace) -> bool:
    """Return whether a step stages anything for gloo."""
    return any(each.category is Category.GLOO_STAGING for each in trace.allocations)


def late_interval(trace: Trace, peak: int) -> Interval:
    """Return the peak as it is with all frees in time, and as it is with late ones."""
    return Interval(low_bytes=peak, high_bytes=peak_bytes(_freed_late(trace), CPU_RULES))


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
