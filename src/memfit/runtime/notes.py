"""What a Run tells of its steps to those who want to know."""

from __future__ import annotations

from typing import Any

from memfit.journal.records import Event


class RunNotes:
    """Pass steps and events on."""

    def step(self, *_: Any) -> None:
        """Pass a step on."""

    def evaluated(self, *_: Any) -> None:
        """Pass an evaluation on."""

    def event(self, event: Event) -> None:
        """Pass an event on."""

    def close(self) -> None:
        """End."""
