"""Reads how much memory is in use at the price of microseconds, and follows it over the steps."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from itertools import pairwise

import psutil
import torch

from memfit.observe.processes import resident_bytes

_PROBES_PER_WINDOW = 4
_MOST_WINDOWS = 48
_LEAST_WINDOWS = 6
_BLOCK_BYTES = 64
"""About what one block of Python's own allocator takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInUse:
    """The memory in use at one moment."""

    host_bytes: int
    """Handed out by malloc and by Python's allocator, free memory not counted; else resident."""
    device_bytes: int

    def above(self, other: MemoryInUse) -> int:
        """Return by how much memory in use exceeds another moment's, on host or device."""
        host = self.host_bytes - other.host_bytes
        return max(host, self.device_bytes - other.device_bytes)


def memory_in_use() -> MemoryInUse:
    """Return what this process has in use now."""
    host = 0
    if hasattr(psutil, "heap_info"):  # where malloc tells
        heap = psutil.heap_info()
        host = heap.heap_used + heap.mmap_used
    if host == 0:  # another allocator than the C library's
        host = resident_bytes(os.getpid(), without_shared=True)
    else:
        host += _BLOCK_BYTES * sys.getallocatedblocks()
    return MemoryInUse(host_bytes=host, device_bytes=_device_bytes())


def _device_bytes() -> int:
    if not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_allocated(each) for each in range(torch.cuda.device_count()))


@dataclass(slots=True)
class Trend:
    """The least level of each window of probes, which batches of different lengths hardly move."""

    windows: list[tuple[int, int]] = field(default_factory=list)
    """The least level of each, and the count of steps at which it was read."""
    _num_per_window: int = _PROBES_PER_WINDOW
    _probes: list[tuple[int, int]] = field(default_factory=list)

    def add(self, count: int, level_bytes: int) -> None:
        """Add a probe."""
        self._probes.append((count, level_bytes))
        if len(self._probes) < self._num_per_window:
            return
        self.windows.append(min(self._probes, key=_level))
        self._probes.clear()
        if len(self.windows) > _MOST_WINDOWS:
            pairs = zip(self.windows[::2], self.windows[1::2], strict=False)
            self.windows = [min(pair, key=_level) for pair in pairs]
            self._num_per_window *= 2

    def steady_growth(self, least_steps: int) -> tuple[float, int] | None:
        """Return steps and bytes of growth that went on evenly; None where it did not.

        The first quarter of the run is left out, because much is made there once.
        """
        windows = self.windows[len(self.windows) // 4 :]
        if len(windows) < _LEAST_WINDOWS or windows[-1][0] - windows[0][0] < least_steps:
            return None
        marks = [windows[(len(windows) - 1) * n // 4] for n in range(5)]
        # Windows become longer with the run: the last one alone shows that growth has ended.
        pairs = (*pairwise(marks), (windows[-2], windows[-1]))
        parts = [(after[1] - before[1]) / max(1, after[0] - before[0]) for before, after in pairs]
        steps, grown = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
        rate = grown / steps
        is_even = rate > 0 and all(0.5 * rate <= part <= 2 * rate for part in parts)
        return (steps, grown) if is_even else None


def _level(probe: tuple[int, int]) -> int:
    return probe[1]
