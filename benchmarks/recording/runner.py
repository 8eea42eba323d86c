"""The recording: one entry after another on the card, the next ones getting ready meanwhile.

Loading packages and drawing weights takes longer than a step, so a few children do that side by
side; the card itself belongs to one of them at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memfit.units import format_bytes

from .matrix import ALLOCATORS, Entry
from .processes import ChildProcess, Job
from .rowfile import RowFile, measured_row, unmeasured_row

Launch = Callable[[Job], ChildProcess]
Report = Callable[[str, str], object]
"""Is told an entry's name and what became of it."""

_POLL_SECONDS = 0.02
_USUAL_SECONDS = 12.0
"""Kept free before the end for an entry of which nothing is known."""


class ProbeError(RuntimeError):
    """Say that the card could not be described."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a recording is run."""

    device: str = "cuda"
    deadline: float = float("inf")
    """The time on the clock at which all must be over."""
    num_preparing: int = 4
    """How many children get ready at a time."""
    row_seconds: float = 120.0
    """The longest that one entry may take, once it has the card."""
    prepare_seconds: float = 240.0
    """The longest that one entry may take to get ready."""
    snapshots: Mapping[str, Path] = field(default_factory=dict)
    """Where the snapshots of some entries go, by entry name."""
    revision: str | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a recording came to."""

    num_recorded: int = 0
    num_failed: int = 0
    num_left: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An entry whose child has been started."""

    entry: Entry
    row: Mapping[str, Any]
    child: ChildProcess


def probe_card(launch: Launch, settings: Settings, clock: Callable[[], float]) -> dict[str, Any]:
    """Have a child describe the card.

    Raises:
        ProbeError: if there is no card, or it cannot be used.
    """
    child = launch(Job(name="probe", row=None, device=settings.device))
    try:
        result = _on_card(child, settings, clock)
        if result is None:
            raise ProbeError(child.complaint())
        return result
    finally:
        child.end()


class Recording:
    """Entries that are measured one after another and kept as they come."""

    def __init__(
        self,
        rows: RowFile,
        launch: Launch,
        probe: Mapping[str, Any],
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        report: Report = lambda _name, _text: None,
    ) -> None:
        self._rows = rows
        self._launch = launch
        self._probe = probe
        self._settings = settings
        self._clock = clock
        self._report = report
        self._longest_seconds = _USUAL_SECONDS

    def run(self, entries: Sequence[Entry]) -> Outcome:
        """Measure what is not yet there, until the list or the time is at its end.

        Whatever ends it, Ctrl-C included: children are ended, and the rows so far are whole.
        """
        outcome = Outcome()
        left = deque(entries)
        waiting: deque[Waiting] = deque()
        try:
            while left or waiting:
                if not self._has_time():
                    break
                while left and len(waiting) < self._settings.num_preparing:
                    waiting.append(self._start(left.popleft()))
                self._finish(waiting[0], outcome)
                waiting.popleft()
        finally:
            for each in waiting:
                each.child.end()
        outcome.num_left = len(left) + len(waiting)
        return outcome

    def _has_time(self) -> bool:
        return self._clock() + self._longest_seconds < self._settings.deadline

    def _start(self, entry: Entry) -> Waiting:
        row = unmeasured_row(entry, self._probe["device"], self._settings.revision)
        job = Job(
            name=entry.name,
            row=row,
            device=self._settings.device,
            allocator=ALLOCATORS[entry.allocator],
            snapshot=self._settings.snapshots.get(entry.name),
        )
        return Waiting(entry=entry, row=row, child=self._launch(job))

    def _finish(self, waiting: Waiting, outcome: Outcome) -> None:
        """Give the card to a child, and keep what comes of it."""
        started = self._clock()
        try:
            result = _on_card(waiting.child, self._settings, self._clock)
        finally:
            waiting.child.end()
        used_seconds = self._clock() - started
        name = waiting.entry.name
        if result is None and self._clock() >= self._settings.deadline:
            outcome.num_left += 1
            self._report(name, "stopped: the time is over")
            return
        self._longest_seconds = max(self._longest_seconds, used_seconds)
        if result is None:
            outcome.num_failed += 1
            complaint = waiting.child.complaint()
            self._rows.append_failure(waiting.row["id"], complaint)
            self._report(name, f"failed: {complaint.splitlines()[-1]}")
            return
        self._rows.append(measured_row(waiting.entry, waiting.row, self._probe, result))
        outcome.num_recorded += 1
        self._report(name, f"{_told(result)}, {used_seconds:.1f} s")


def _on_card(child: ChildProcess, settings: Settings, clock: Callable[[], float]) -> Any:
    """Wait until a child is ready, give it the card, and wait for its outcome."""
    if not _wait(child.is_ready, child, settings.prepare_seconds, settings, clock):
        return None
    child.go()
    _wait(child.has_ended, child, settings.row_seconds, settings, clock)
    if not child.has_ended():
        child.end()
        return None
    return child.result()


def _wait(
    is_done: Callable[[], bool],
    child: ChildProcess,
    seconds: float,
    settings: Settings,
    clock: Callable[[], float],
) -> bool:
    """Wait until something is done, the child is over, or the time is."""
    until = min(clock() + seconds, settings.deadline)
    while not is_done() and not child.has_ended() and clock() < until:
        time.sleep(_POLL_SECONDS)
    return is_done()


def _told(result: Mapping[str, Any]) -> str:
    """Write an outcome in a few words."""
    figures = {name.removesuffix("_bytes"): each for name, each in result["measured"].items()}
    known = [f"{name} {format_bytes(each)}" for name, each in figures.items() if each is not None]
    return ", ".join([result["outcome"], *known])
