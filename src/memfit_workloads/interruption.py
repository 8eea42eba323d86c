"""Ctrl-C at a moment of our choosing: the step under way is finished first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class InterruptWatch:
    """Note the first Ctrl-C while active; the second one interrupts at once.

    Signals reach the main thread alone, so elsewhere nothing is watched. A patient watch never
    interrupts by itself: one process of several is told by its terminal and by its launcher.
    """

    def __init__(self, *, is_patient: bool = False) -> None:
        self.is_requested = False
        self._is_patient = is_patient
        self._previous: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _note(self, _signal_number: int, _frame: FrameType | None) -> None:
        if self.is_requested and not self._is_patient:
            raise KeyboardInterrupt
        self.is_requested = True
