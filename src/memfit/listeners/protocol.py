"""What a run tells, and to whom."""

from __future__ import annotations

from typing import Protocol

from memfit.journal.records import Ending, Event, RunFacts, StepRecord


class StepListener(Protocol):
    """Hear what a run does: its beginning, each step, each event, and its end.

    Called between steps, from the thread that trains. A listener that raises is dropped.
    """

    def begin(self, facts: RunFacts) -> None:
        """Hear what is run."""

    def step(self, record: StepRecord) -> None:
        """Hear of a step that was run."""

    def event(self, event: Event) -> None:
        """Hear that something happened."""

    def end(self, ending: Ending | None) -> None:
        """Hear that the run is over; None where nobody knows how it ended."""
