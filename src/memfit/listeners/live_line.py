"""One line in the terminal that follows a run, and a line for everything that happens to it."""

from __future__ import annotations

import time

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from memfit.journal.records import (
    DriftEvent,
    Ending,
    Event,
    LeakEvent,
    OutOfMemoryEvent,
    PlanClimbedEvent,
    Reason,
    RunFacts,
    StepRecord,
    UnprovedPlanEvent,
)
from memfit.journal.sentences import event_sentence
from memfit.units import format_bytes, format_seconds, in_unit_of

from .printable_console import PrintableConsole

_REDRAW_SECONDS = 0.1
_STYLES: dict[type[Event], str] = {
    OutOfMemoryEvent: "yellow",
    PlanClimbedEvent: "green",
    DriftEvent: "yellow",
    LeakEvent: "bold red",
    UnprovedPlanEvent: "yellow",
}
_BACK_TO_AN_EMPTY_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class LiveLine:
    """Show the latest step in one line on standard error, and each event in a line of its own.

    In a terminal the line is updated in place, at most ten times a second. Elsewhere, as in the log
    of a batch job, a line is written now and then. Output of others that does not end its line may
    share one with it, as with other progress bars.

    Args:
        log_seconds: how often to write a line where there is no terminal; None writes events alone.
        console: where to write; None means standard error.
    """

    def __init__(self, *, log_seconds: float | None = 30.0, console: Console | None = None) -> None:
        self._console: Console = console or PrintableConsole(stderr=True)
        self._log_seconds = log_seconds
        self._next_seconds = 0.0
        self._peak_bytes: int | None = None
        self._latest: StepRecord | None = None
        self._is_drawn = False
        self._is_silent = False

    def begin(self, facts: RunFacts) -> None:
        """Wait for the first step; of several ranks, the first one speaks for all."""
        self._is_silent = facts.rank != 0

    def step(self, record: StepRecord) -> None:
        """Show a step, unless another one was shown a moment ago."""
        if record.peak_allocated_bytes is not None:
            self._peak_bytes = record.peak_allocated_bytes
        self._latest = record
        now_seconds = time.monotonic()
        if self._is_silent or now_seconds < self._next_seconds:
            return
        if self._console.is_terminal:
            self._next_seconds = now_seconds + _REDRAW_SECONDS
            self._draw()
        elif self._log_seconds is not None:
            self._next_seconds = now_seconds + self._log_seconds
            self._console.print(Text(self._line()), soft_wrap=True)

    def event(self, event: Event) -> None:
        """Write a line for what happened, above the line of the steps."""
        if self._is_silent:
            return
        self._erase()
        text = Text(self._writable(event_sentence(event)), style=_STYLES[type(event)])
        self._console.print(text, soft_wrap=True)
        if self._latest is not None and self._console.is_terminal:
            self._draw()

    def end(self, ending: Ending | None) -> None:
        """Leave the last line where it is, and say why the run ended unless it is simply done."""
        if self._is_silent:
            return
        if self._latest is not None:
            self._erase()
            self._console.print(Text(self._line()), soft_wrap=True)
        if ending is not None and ending.reason is not Reason.DONE:
            text = Text(f"{ending.sentence} {ending.remedy}".rstrip(), style="bold red")
            self._console.print(text, soft_wrap=True)

    def _line(self) -> str:
        record = self._latest
        assert record is not None, "a line is written of a step"
        return self._writable(step_line(record, self._peak_bytes))

    def _writable(self, text: str) -> str:
        """Do without the dots where the terminal cannot write them."""
        return text.replace(" · ", " | ") if self._console.options.ascii_only else text

    def _draw(self) -> None:
        self._erase()
        # A full last column would move the cursor to the next line.
        text = Text(self._line())
        text.truncate(max(1, self._console.width - 1), overflow="ellipsis")
        self._console.print(text, end="", soft_wrap=True)
        self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._console.control(_BACK_TO_AN_EMPTY_LINE)
            self._is_drawn = False


def step_line(record: StepRecord, peak_bytes: int | None) -> str:
    """Write a step in a line; what is not known is left out.

    Args:
        record: the step.
        peak_bytes: the latest peak that was measured: on the CPU not every step is.
    """
    predicted_bytes = record.predicted_peak_bytes
    parts = [f"step {record.step:,}", format_seconds(record.step_seconds)]
    if peak_bytes is not None:
        beside = ""
        if predicted_bytes is not None:
            beside = f" (predicted {in_unit_of(predicted_bytes, peak_bytes)})"
        parts.append(f"peak {format_bytes(peak_bytes)}{beside}")
    elif predicted_bytes is not None:
        parts.append(f"peak predicted {format_bytes(predicted_bytes)}")
    if record.peak_reserved_bytes is not None:
        reserved = (
            format_bytes(record.peak_reserved_bytes)
            if peak_bytes is None
            else in_unit_of(record.peak_reserved_bytes, peak_bytes)
        )
        parts.append(f"reserved {reserved}")
    if record.host_bytes is not None:
        parts.append(f"host {format_bytes(record.host_bytes)}")
    counts = {"micro-batch": record.micro_batch_size, "retries": record.allocator_retries}
    parts += [f"{name} {count:,}" for name, count in counts.items() if count is not None]
    return " · ".join(parts)
