"""When a search has to come to an end, whatever it may still find."""

from __future__ import annotations

import math
import os
import time

from memfit.errors import UsageError


class Patience:
    """Say whether planning may go on: for so many seconds, and until it is interrupted.

    Args:
        seconds: from now on; None sets no bound.
        first_share: of them, after which it is over at first, until the rest is given.
        processor_seconds: how much of the processor may be used from now on; None sets no bound.

    Raises:
        UsageError: if a bound is not a positive number.
    """

    def __init__(
        self,
        seconds: float | None = None,
        first_share: float = 1.0,
        processor_seconds: float | None = None,
    ) -> None:
        for name, bound in {"seconds": seconds, "processor_seconds": processor_seconds}.items():
            if bound is not None and not 0 < bound < math.inf:
                msg = f"{name} must be a positive number, not {bound}; leave it out for no bound."
                raise UsageError(msg)
        self.seconds = seconds
        self._share = first_share
        self.is_interrupted = False
        self.has_plan = False
        """Whether something that fits is known."""
        self._most_processor_seconds = processor_seconds or math.inf
        self._begun, self._processor_begun = time.perf_counter(), _processor_seconds()

    @property
    def elapsed_seconds(self) -> float:
        """Return how long it has been since planning began."""
        return time.perf_counter() - self._begun

    @property
    def is_over(self) -> bool:
        """Return whether the best that is known has to do."""
        used_seconds = _processor_seconds() - self._processor_begun
        if self.is_interrupted or used_seconds >= self._most_processor_seconds:
            return True
        return self.seconds is not None and self.elapsed_seconds >= self._share * self.seconds

    @property
    def is_over_for_good(self) -> bool:
        """Return whether even a recording that was begun is not waited for."""
        return self.has_plan and self.is_over

    def give_rest(self) -> None:
        """Have all of the seconds count from now on."""
        self._share = 1.0

    def interrupt(self) -> None:
        """Have it be over now."""
        self.is_interrupted = True


def _processor_seconds() -> float:
    """Return the processor time of this process and of those that it has started and are over."""
    return sum(os.times()[:4])
