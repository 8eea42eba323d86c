"""Reads the CPU allocator's own events: every allocation and free, with its bytes and address.

The CPU allocator keeps no counters, but it reports each event to torch's profiler
(``reportMemoryUsageToProfiler`` in c10/core/CPUAllocator.cpp, read at torch 2.13). A thread without
a profiler, as gloo's are, reports nothing; but each event has the sum over all blocks that the
allocator has noted, and under the flag below it notes those of every thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch

OTHER_THREADS = 0
"""The address of an event that stands for all that other threads took and freed since the last."""


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
    kind that there never is. In a process that talks to other ranks, what threads without a
    profiler take and free counts too: gloo's free what a collective has staged.
    """

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # as above
        profile: Any = torch.autograd.profiler.profile(
            use_cpu=True, use_kineto=True, profile_memory=True
        )
        self._config, self._activities = profile.config(), profile.kineto_activities
        self._results: Any = None
        self._sees_all_threads = False

    def begin(self) -> None:
        """Collect from here."""
        ranks = torch.distributed
        self._sees_all_threads = ranks.is_available() and ranks.is_initialized()
        _notes_all_threads().value = self._sees_all_threads
        functions: Any = torch._C._autograd
        scopes = {torch._C._profiler.RecordScope.LITE_INTERPRETER}
        functions._prepare_profiler(self._config, self._activities)
        functions._enable_profiler(self._config, self._activities, scopes)

    def end(self) -> None:
        """Collect no more."""
        _notes_all_threads().value = False
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
            is_end = event.num_bytes < 0
            if event.address == OTHER_THREADS:
                current += event.num_bytes
            elif is_end or not self._sees_all_threads:  # else the end of what lay there is counted
                current -= living.pop(event.address, 0)
            if not is_end and event.address != OTHER_THREADS:
                living[event.address] = event.num_bytes
                current += event.num_bytes
            highest = max(highest, current)
        return highest

    def events(self) -> list[AllocatorEvent]:
        """Return every event in order."""
        return _events(self._results)


def _events(results: Any) -> list[AllocatorEvent]:
    found: list[AllocatorEvent] = []
    total_bytes: int | None = None
    for node in _allocations(results):
        fields, time_ns = node.extra_fields, node.start_time_ns
        num_bytes = fields.alloc_size
        others_bytes = fields.total_allocated - num_bytes - (total_bytes or 0)
        if total_bytes is not None and others_bytes:
            found.append(AllocatorEvent(others_bytes, OTHER_THREADS, time_ns, ""))
        total_bytes = fields.total_allocated
        operator = node.parent.name if node.parent is not None else ""
        found.append(AllocatorEvent(num_bytes, fields.ptr, time_ns, operator))
    return found


def _highest_growth_bytes(results: Any) -> int:
    fields = [node.extra_fields for node in _allocations(results)]
    if not fields:
        return 0
    begin_bytes: int = fields[0].total_allocated - fields[0].alloc_size
    highest_bytes: int = max(each.total_allocated for each in fields)
    return max(0, highest_bytes - begin_bytes)


def _allocations(results: Any) -> list[Any]:
    """Return the nodes of all allocations and frees in order."""
    allocation = torch._C._profiler._EventType.Allocation
    nodes = _walk(results.experimental_event_tree())
    found = [n for n in nodes if n.tag == allocation and n.extra_fields.device.type == "cpu"]
    return sorted(found, key=lambda node: node.start_time_ns)


def _walk(nodes: Any) -> Iterator[Any]:
    """Yield every node of an event tree."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children)


@cache
def _notes_all_threads() -> ctypes.c_bool:
    """Return the flag under which the allocator notes what threads without a profiler do.

    It also writes a line for each event to torch's log. Where that is shown, and in builds without
    the flag, what is returned changes nothing.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        if ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value <= 0:
            return ctypes.c_bool()
        return ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError):
        return ctypes.c_bool()
