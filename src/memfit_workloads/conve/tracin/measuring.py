"""Measures what the first steps of a scan take of the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit import influence
from memfit.observe.allocator_events import GrowthWatch

from .progress import Listener

_NUM_STEPS = 3
"""All steps take the same; watching them all would keep a record of every allocation."""


@dataclass(slots=True, kw_only=True)
class ScanPeaks:
    """The highest peak of scans of one model, weights included."""

    model: nn.Module
    mapped_bytes: frozenset[int] = frozenset()
    """Sizes of the checkpoint files, which are mapped and not allocated while they are read."""
    highest_bytes: int | None = None
    """None where nothing could be measured, as while the caller profiles."""

    @contextmanager
    def watching(self, listener: Listener | None) -> Iterator[Listener]:
        """Measure the proof and the first steps of the scan that tells the listener it gives."""
        peak = _CardPeak() if next(self.model.parameters()).is_cuda else self._on_host()
        num_done = 0

        def listen(progress: influence.Progress) -> None:
            nonlocal num_done
            num_done += 1
            if num_done == _NUM_STEPS:
                self._take(peak.end())
            if listener is not None:
                listener(progress)

        try:
            yield listen
        finally:
            self._take(peak.end())

    def _on_host(self) -> _HostPeak:
        return _HostPeak(self.model, self.mapped_bytes)

    def _take(self, peak_bytes: int | None) -> None:
        if peak_bytes is not None:
            self.highest_bytes = max(peak_bytes, self.highest_bytes or 0)


class _CardPeak:
    """Reads the caching allocator's counter."""

    def __init__(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def end(self) -> int | None:
        """Return the peak so far."""
        return torch.cuda.max_memory_allocated()


class _HostPeak:
    """Watches the CPU allocator's events, and adds the weights that were there before."""

    def __init__(self, model: nn.Module, mapped_bytes: frozenset[int]) -> None:
        self._mapped_bytes = mapped_bytes
        self._own_bytes = sum(each.nbytes for each in model.state_dict().values())
        # There can be only one profile at a time.
        functions: Any = torch._C._autograd
        is_free = not functions._profiler_enabled()
        self._watch = GrowthWatch() if is_free else None
        if self._watch is not None:
            self._watch.begin()

    def end(self) -> int | None:
        """Watch no more, and return the peak; None from the second time on."""
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        watch.end()
        current = highest = 0
        for event in watch.events():
            # The profiler is told of a mapped file as if it were allocated.
            if abs(event.num_bytes) not in self._mapped_bytes:
                current += event.num_bytes
                highest = max(highest, current)
        return self._own_bytes + highest
