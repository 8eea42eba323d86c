"""Reads the CPU allocator's own events: every allocation and free, with its bytes and address.

The CPU allocator keeps no counters, but it reports each event to torch's profiler
(``reportMemoryUsageToProfiler`` in c10/core/CPUAllocator.cpp, read at torch 2.13).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

_MEMORY_EVENT = "[memory]"


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """One event: signed bytes, the block's address, when, and the operator that ran."""

    num_bytes: int
    address: int
    time_ns: int
    operator: str


class AllocatorWatch:
    """Collect the CPU allocator's events while active.

    Does not see memory that libraries take without torch's allocator (oneDNN's packed weights,
    NumPy), nor anything before it became active.
    """

    def __init__(self) -> None:
        # Torch's profiler tells stderr of every start and stop unless this is set before its first.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile: Any = torch.autograd.profiler.profile(
            use_cpu=True, use_kineto=True, profile_memory=True
        )

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._profile.__exit__(*exc_info)

    def highest_growth_bytes(self) -> int:
        """Return the highest sum of allocations less frees since the watch began."""
        return _highest_growth_bytes(self._profile.kineto_results)

    def events(self) -> list[AllocatorEvent]:
        """Return every event in order."""
        return _events(self._profile.kineto_results)

    def marks(self, prefix: str) -> list[tuple[int, str]]:
        """Return the start of every ``record_function`` range whose name begins with ``prefix``."""
        return sorted(
            (event.start_ns(), event.name().removeprefix(prefix))
            for event in self._profile.kineto_results.events()
            if event.name().startswith(prefix)
        )


class GrowthWatch:
    """Collect allocations and frees alone, without operators, from any place to any other place.

    The profiler keeps a pointer to its own record of each operator and range that begins while it
    is active. One that ends after the profiler has stopped and begun anew writes through it into
    freed memory (onFunctionExit in torch/csrc/autograd/profiler_kineto.cpp; seen with torch 2.13 to
    corrupt the heap). So an ``AllocatorWatch`` must not begin in one range and end in another, as
    hooks of an optimizer do. This one records no operators and no ranges: it asks for those of a
    kind that there never is.
    """

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # as above
        profile: Any = torch.autograd.profiler.profile(
            use_cpu=True, use_kineto=True, profile_memory=True
        )
        self._config, self._activities = profile.config(), profile.kineto_activities
        self._results: Any = None

    def begin(self) -> None:
        """Collect from here."""
        functions: Any = torch._C._autograd
        scopes = {torch._C._profiler.RecordScope.LITE_INTERPRETER}
        functions._prepare_profiler(self._config, self._activities)
        functions._enable_profiler(self._config, self._activities, scopes)

    def end(self) -> None:
        """Collect no more."""
        self._results = torch._C._autograd._disable_profiler()

    def highest_growth_bytes(self) -> int:
        """Return the highest sum of allocations less frees since the watch began."""
        return _highest_growth_bytes(self._results)

    def highest_living_bytes(self) -> int:
        """Return the most that lived at once of all blocks whose beginning was seen.

        A block may end with another size than it began with, as the allocator remembers sizes of
        earlier profiles. Its own size counts, and the end of one that was never seen does not.
        """
        living: dict[int, int] = {}
        current = highest = 0
        for event in self.events():
            current -= living.pop(event.address, 0)
            if event.num_bytes > 0:
                living[event.address] = event.num_bytes
                current += event.num_bytes
                highest = max(highest, current)
        return highest

    def events(self) -> list[AllocatorEvent]:
        """Return every event in order."""
        return _events(self._results)


def _events(results: Any) -> list[AllocatorEvent]:
    allocation = torch._C._profiler._EventType.Allocation
    found = [
        AllocatorEvent(
            node.extra_fields.alloc_size,
            node.extra_fields.ptr,
            node.start_time_ns,
            node.parent.name if node.parent is not None else "",
        )
        for node in _walk(results.experimental_event_tree())
        if node.tag == allocation and node.extra_fields.device.type == "cpu"
    ]
    return sorted(found, key=lambda event: event.time_ns)


def _highest_growth_bytes(results: Any) -> int:
    deltas = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == _MEMORY_EVENT]
    deltas.sort(key=lambda delta: delta[0])
    current = highest = 0
    for _, num_bytes in deltas:
        current += num_bytes
        highest = max(highest, current)
    return highest


def _walk(nodes: Any) -> Iterator[Any]:
    """Yield every node of an event tree."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children)
