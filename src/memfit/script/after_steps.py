"""Bounds what a script does after its recorded steps, on its way to evaluation and checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from memfit.virtual.loaders import Asked

_MOST_EXTRA_STEPS = 200
_MOST_EXTRA_SECONDS = 60.0
"""Of loops that nothing can end: without a loader, by ``next``, or over data of no known length."""
_MOST_STEPS_OF_LATER_EPOCHS = 20
_MOST_SECONDS_OF_LATER_EPOCHS = 20.0
_SECONDS_BEYOND = 20.0
"""After the first evaluation and checkpoint, for later ones and for a second training."""


class AfterSteps:
    """Decide how long a script may train on once its steps are recorded, and what that leaves out.

    A ``for`` loop over training data is told that its epoch is over. Where evaluation or checkpoint
    do not come then, the script gets more batches for a while, because many evaluate every so many
    steps; after that, epochs are empty, so that it gets to its end. ``next`` outside of a loop gets
    batches first, as a ``StopIteration`` there ends the script.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._enough_at: float | None = None
        self._ended: list[object] = []
        self._num_batches: int | None = None
        self.num_extra = 0
        self.is_cut_short = False

    @property
    def is_over(self) -> bool:
        """Return whether the time is over that a script has after all was seen."""
        return self._enough_at is not None and self._clock() - self._enough_at > _SECONDS_BEYOND

    @property
    def has_seen_all(self) -> bool:
        """Return whether an evaluation and a checkpoint came after the steps."""
        return self._enough_at is not None

    def begin(self) -> None:
        """Hear that all the steps are recorded."""
        if self._began is None:
            self._began = self._clock()

    def see_all(self) -> None:
        """Hear that an evaluation and a checkpoint came after the steps."""
        if self._enough_at is None:
            self._enough_at = self._clock()

    def may_step(self) -> bool:
        """Return whether another update may follow the recorded ones."""
        self.num_extra += 1
        return self._is_within(_MOST_EXTRA_STEPS, _MOST_EXTRA_SECONDS)

    def may_give(self, asked: Asked) -> bool:
        """Return whether a loop gets another batch of training data, or hears that it has ended."""
        if not self.has_seen_all and self._helps(asked):
            return True
        self._ended.append(asked.source)
        self.cut_short(asked.num_batches)
        return False

    def cut_short(self, num_batches: int | None = None) -> None:
        """Hear that an epoch ends before its time.

        Args:
            num_batches: that the epoch would have had, where that is known.
        """
        if not self.is_cut_short:
            self.is_cut_short, self._num_batches = True, num_batches

    def notes(self, num_steps: int, seen: Sequence[str]) -> tuple[str, ...]:
        """Say what the figures of phases rest on, where that is less than in a real run.

        Args:
            num_steps: how many updates were recorded.
            seen: the phases that came after them.
        """
        if not self.is_cut_short or not seen:
            return ()
        num_steps += self.num_extra
        whole = "" if self._num_batches is None else f", of {self._num_batches:,} batches,"
        phases = " and ".join(seen).capitalize()
        note = (
            f"{phases} came after {num_steps} steps: the epoch{whole} was cut short, and what the "
            "script collects over an epoch is not in the figures"
        )
        return (note,)

    def _helps(self, asked: Asked) -> bool:
        """Return whether more batches may bring a script on."""
        is_endless = asked.num_batches is None or not asked.ends_loop
        if is_endless:
            return self._is_within(_MOST_EXTRA_STEPS, _MOST_EXTRA_SECONDS)
        is_later_epoch = any(asked.source is each for each in self._ended)
        return is_later_epoch and self._is_within(
            _MOST_STEPS_OF_LATER_EPOCHS, _MOST_SECONDS_OF_LATER_EPOCHS
        )

    def _is_within(self, most_steps: int, most_seconds: float) -> bool:
        self.begin()
        assert self._began is not None, "it was just begun"
        return self.num_extra <= most_steps and self._clock() - self._began <= most_seconds
