"""One training step, measured: what is read, when, and what becomes of a failure.

The card is handed in, so that the order of readings is the same on a real card, on the processor
(where nothing is read) and in tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Step = Callable[[], None]
Watch = Callable[[str], None]
Place = Callable[[str, Watch], Step]
"""Puts model, optimizer and batch on a device, and gives the function of one step."""

_NUM_TIMED_STEPS = 3
_LONGEST_TEXT = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    """What the process occupied on the card at one moment."""

    process_bytes: int | None
    source: str | None
    every_way: dict[str, int] = field(default_factory=dict)
    """The same, read in every way that there is."""


class Card:
    """What a measurement asks of a device, of which nothing is read as long as none says more."""

    device = "cpu"
    """``cuda`` or ``cpu``."""
    out_of_memory: tuple[type[BaseException], ...] = (MemoryError,)
    """What is raised when memory runs out."""

    def start(self) -> None:
        """Make the context; nothing has been on the card before."""

    def wait(self) -> None:
        """Wait until the card has done its work."""

    def allocated_bytes(self) -> int | None:
        """Read what the allocator has handed out now."""
        return None

    def reserved_bytes(self) -> int | None:
        """Read what the allocator holds now."""
        return None

    def peaks(self) -> tuple[int | None, int | None]:
        """Read the highest allocated and reserved bytes since the last reset."""
        return None, None

    def reset_peaks(self) -> None:
        """Begin counting peaks anew."""

    def process(self) -> ProcessReading:
        """Read what the process occupies."""
        return ProcessReading(process_bytes=None, source=None)

    def further(self) -> dict[str, Any]:
        """Read what explains a figure: settings of the allocator, retries."""
        return {}

    def record_history(self) -> None:
        """Begin to note every allocation."""

    def save_history(self, path: Path) -> None:
        """Save what was noted."""
        del path

    def seconds(self, step: Step) -> float:
        """Time one step."""
        started = time.perf_counter()
        step()
        return time.perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What came of one entry."""

    outcome: str
    """``ok`` or ``oom``."""
    measured: dict[str, int | None]
    process_source: str | None
    measured_extra: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


class PhaseWatch:
    """Reads the peak of each phase of a step, once it is switched on.

    The peaks are those of ``max_memory_allocated`` between a phase's begin and end; phases of the
    same name, as under accumulation, give their highest.
    """

    def __init__(self, card: Card) -> None:
        self._card = card
        self._is_on = False
        self.peaks: dict[str, int] = {}

    def start(self) -> None:
        """Begin with the next step."""
        self._is_on = True
        self._begin_phase()

    def stop(self) -> None:
        """Take no further notice."""
        self._is_on = False

    def __call__(self, phase: str) -> None:
        """Note the end of a phase."""
        if not self._is_on:
            return
        self._card.wait()
        peak_bytes, _ = self._card.peaks()
        if peak_bytes is not None:
            self.peaks[phase] = max(peak_bytes, self.peaks.get(phase, 0))
        self._begin_phase()

    def _begin_phase(self) -> None:
        self._card.wait()
        self._card.reset_peaks()


def measure(place: Place, card: Card, snapshot: Path | None = None) -> Reading:
    """Measure a step: one to warm up, a reset of the peaks, and one that counts.

    Phases are read in a further step, so that their synchronisation cannot change the figures.
    """
    extra: dict[str, Any] = {}
    card.start()
    extra["context_after_init_bytes"] = _outside_allocator(card, card.process())
    if snapshot is not None:
        card.record_history()
    try:
        return _measured(place, card, snapshot, extra)
    except card.out_of_memory as error:
        peaks = dict(zip(("allocated", "reserved"), card.peaks(), strict=True))
        extra |= {f"oom_peak_{name}_bytes": peak for name, peak in peaks.items()}
        extra["oom_text"] = str(error)[:_LONGEST_TEXT]
        return Reading(
            outcome="oom",
            measured=dict.fromkeys(_MEASURED),
            process_source=None,
            measured_extra=extra | card.further(),
        )


_MEASURED = ("allocated_bytes", "reserved_bytes", "process_bytes", "context_bytes")


def _measured(place: Place, card: Card, snapshot: Path | None, extra: dict[str, Any]) -> Reading:
    """Run the steps; ``extra`` says how far it came if memory runs out."""
    watch = PhaseWatch(card)
    extra["oom_in"] = "setup"
    step = place(card.device, watch)
    card.wait()
    extra |= {
        "setup_allocated_bytes": card.allocated_bytes(),
        "setup_reserved_bytes": card.reserved_bytes(),
        "oom_in": "first step",
    }
    step()
    card.wait()
    extra["first_step_allocated_bytes"], extra["first_step_reserved_bytes"] = card.peaks()
    extra["between_steps_allocated_bytes"] = card.allocated_bytes()
    extra["oom_in"] = "measured step"
    card.reset_peaks()
    step()
    card.wait()
    allocated, reserved = card.peaks()
    process = card.process()
    if snapshot is not None:
        card.save_history(snapshot)
    measured = {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "process_bytes": process.process_bytes,
        "context_bytes": _outside_allocator(card, process),
    }
    extra["reserved_at_process_reading_bytes"] = card.reserved_bytes()
    del extra["oom_in"]
    extra |= process.every_way | card.further()
    extra |= _phases_and_seconds(card, watch, step)
    return Reading(
        outcome="ok",
        measured=measured,
        process_source=process.source,
        measured_extra=extra,
    )


def _phases_and_seconds(card: Card, watch: PhaseWatch, step: Step) -> dict[str, Any]:
    """Read the phases in one further step, and the time of some more."""
    watch.start()
    step()
    watch.stop()
    peaks = {f"phase_peak_{phase}_bytes": peak for phase, peak in watch.peaks.items()}
    seconds = min(card.seconds(step) for _ in range(_NUM_TIMED_STEPS))
    return peaks | {"step_seconds": seconds}


def _outside_allocator(card: Card, process: ProcessReading) -> int | None:
    """Return what the process occupies beside the memory of torch's allocator."""
    reserved_bytes = card.reserved_bytes()
    if process.process_bytes is None or reserved_bytes is None:
        return None
    return process.process_bytes - reserved_bytes
