"""What a Run tells of its steps to those who want to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memfit.journal.records import Event


class RunNotes:
    """Pass steps and events on."""

    def __init__(self) -> None:
        self._listening: list[Callable[[Event], None]] = []

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Tell of events from here on."""
        self._listening.append(listener)

    def step(self, *_: Any) -> None:
        """Pass a step on."""

    def evaluated(self, *_: Any) -> None:
        """Pass an evaluation on."""

    def event(self, event: Event) -> None:
        """Pass an event on."""
        for listener in self._listening:
            listener(event)

    def close(self) -> None:
        """End."""
