"""Tells several listeners, and lets none of them end a training run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

from memfit.journal.records import Ending, Event, RunFacts, StepRecord

from .protocol import StepListener


class Listeners:
    """Tell every listener; drop one that fails, with one warning, and go on without it.

    It has the methods of a ``StepListener`` itself.
    """

    def __init__(self, listeners: Iterable[StepListener] = ()) -> None:
        self._listeners = [*listeners]

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: StepListener) -> None:
        """Tell one listener more from now on."""
        self._listeners.append(listener)

    def begin(self, facts: RunFacts) -> None:
        """Tell what is run."""
        self._tell(lambda listener: listener.begin(facts))

    def step(self, record: StepRecord) -> None:
        """Tell of a step."""
        self._tell(lambda listener: listener.step(record))

    def event(self, event: Event) -> None:
        """Tell that something happened."""
        self._tell(lambda listener: listener.event(event))

    def end(self, ending: Ending | None) -> None:
        """Tell that the run is over, once."""
        self._tell(lambda listener: listener.end(ending))
        self._listeners.clear()

    def _tell(self, tell: Callable[[StepListener], None]) -> None:
        failed: list[tuple[StepListener, str]] = []
        for listener in self._listeners:
            try:
                tell(listener)
            except Exception as error:  # noqa: BLE001 - whatever it raises, training goes on
                failed.append((listener, f"{type(error).__name__}: {error}"))
        if failed:
            self._drop(failed)

    def _drop(self, failed: Sequence[tuple[StepListener, str]]) -> None:
        # Warned about only once all have been told, as a filter may turn a warning into an error.
        self._listeners = [
            listener
            for listener in self._listeners
            if not any(listener is dropped for dropped, _ in failed)
        ]
        for listener, cause in failed:
            warnings.warn(
                f"The listener {type(listener).__name__} failed ({cause}) and is told no more; "
                "training goes on.",
                RuntimeWarning,
                stacklevel=4,
            )
