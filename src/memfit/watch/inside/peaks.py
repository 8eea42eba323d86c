"""Measures the peak of each step, as the device allows: counted, or watched now and then."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd import profiler

from memfit.observe.allocator_events import GrowthWatch
from memfit.observe.monitor import StepMonitor, StepReading

from .budgets import WatchedBudget

_OVERHEAD_FRACTION = 0.001
"""Of the time, for watching steps on the CPU. The hooks and the leak finder take their part of
one hundredth as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peak of a step; None where it was not measured."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    allocator_retries: int | None = None


class Peaks(Protocol):
    """Measure the peaks of steps that follow each other."""

    def begin(self, batch_bytes: int) -> None:
        """Begin a step, or learn in the course of one how large its batch is."""

    def end(self, step_seconds: float) -> Peak:
        """End the step."""

    def close(self) -> None:
        """Measure no more."""


class BudgetPeaks:
    """Read what an enforced budget has counted."""

    def __init__(self, budget: WatchedBudget) -> None:
        self._budget = budget

    def begin(self, batch_bytes: int) -> None:
        """Do nothing: it counts by itself."""

    def end(self, step_seconds: float) -> Peak:
        """Take the highest count, and let it begin anew."""
        del step_seconds
        return Peak(allocated_bytes=self._budget.begin_anew())

    def close(self) -> None:
        """Do nothing."""


class CudaPeaks:
    """Read the counters of the caching allocator, which it keeps for every step."""

    def begin(self, batch_bytes: int) -> None:
        """Do nothing: it counts by itself."""

    def end(self, step_seconds: float) -> Peak:
        """Take the peaks, and let them begin anew."""
        del step_seconds
        # One call into C; the functions for one figure each build the whole table every time.
        stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict()
        peak = Peak(
            allocated_bytes=stats["allocated_bytes"]["all"]["peak"],
            reserved_bytes=stats["reserved_bytes"]["all"]["peak"],
            allocator_retries=stats["num_alloc_retries"],
        )
        torch.cuda.reset_peak_memory_stats()
        return peak

    def close(self) -> None:
        """Do nothing."""


class CpuPeaks:
    """Watch some steps event by event, within a small share of the time.

    The peak is what lives when watching begins and the highest growth after it. Gives way to a
    profile of the script's own, also to one that begins while a step is watched, and for good:
    ranges that began in such a profile must not end while another one is active.
    """

    def __init__(self) -> None:
        self._monitor = StepMonitor("cpu", _OVERHEAD_FRACTION)
        self._watch: GrowthWatch | None = None
        self._base_bytes = 0
        self._is_closed = False
        self._thread = threading.get_ident()
        _before_profiles(self.close)

    def begin(self, batch_bytes: int) -> None:
        """Watch from here where that is due."""
        if self._watch is not None:
            self._monitor.note_batch(batch_bytes)
            return
        if self._is_closed or not self._monitor.is_due(batch_bytes):
            return
        self._base_bytes = living_bytes()
        watch = GrowthWatch()
        watch.begin()
        self._watch = watch

    def end(self, step_seconds: float) -> Peak:
        """Return the peak, if the step was watched."""
        watch, self._watch = self._watch, None
        peak_bytes = None
        if watch is not None:
            watch.end()
            peak_bytes = self._base_bytes + watch.highest_growth_bytes()
        self._monitor.account(StepReading(measured_peak_bytes=peak_bytes), step_seconds)
        return Peak(allocated_bytes=peak_bytes)

    def close(self) -> None:
        """Watch no more; also called where a profile of the script's own is about to begin."""
        self._is_closed = True
        if self._watch is None or self._thread != threading.get_ident():
            return  # each thread has a profiler of its own
        watch, self._watch = self._watch, None
        with contextlib.suppress(RuntimeError):  # the script has stopped it with its own hands
            watch.end()


def _before_profiles(give_way: Any) -> None:
    """Have something called before any profile is prepared or begun."""
    for name in ("_prepare_profiler", "_enable_profiler"):
        original = getattr(profiler, name, None)
        if original is not None:
            setattr(profiler, name, _preceded(original, give_way))


def _preceded(original: Any, give_way: Any) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        give_way()
        return original(*args, **kwargs)

    return function


def living_bytes() -> int:
    """Add up the storages of all CPU tensors that Python knows, each storage once."""
    sizes: dict[int, int] = {}
    kinds = set(_kinds(torch.Tensor))
    # By type, not isinstance: proxies answer __class__ by importing what they stand for, and
    # there are half a million objects to look at.
    for tensor in [each for each in gc.get_objects() if type(each) in kinds]:
        _add_storage(sizes, tensor)
    return sum(sizes.values())


def _kinds(kind: type) -> Iterator[type]:
    """Yield a class and all classes below it."""
    yield kind
    found: list[type] = type.__subclasses__(kind)
    for below in found:
        yield from _kinds(below)


def _add_storage(sizes: dict[int, int], tensor: torch.Tensor) -> None:
    try:
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        sizes[storage._cdata] = storage.nbytes()
    except (NotImplementedError, RuntimeError):
        return  # a sparse tensor, or one that only stands for others, has no storage of its own
