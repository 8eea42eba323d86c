"""When a search has to come to an end, whatever it may still find."""

from __future__ import annotations

import math
import time

from memfit.errors import UsageError


class Patience:
    """Say whether planning may go on: for so many seconds, and until it is interrupted.

    Args:
        seconds: from now on; None sets no bound.
        first_share: of them, after which it is over at first, until the rest is given.

    Raises:
        UsageError: if the bound is not a positive number.
    """

    def __init__(self, seconds: float | None = None, first_share: float = 1.0) -> None:
        if seconds is not None and not 0 < seconds < math.inf:
            msg = f"seconds must be a positive number, not {seconds}; leave it out for no bound."
            raise UsageError(msg)
        self.seconds = seconds
        self._share = first_share
        self.is_interrupted = False
        self._begun = time.perf_counter()

    @property
    def elapsed_seconds(self) -> float:
        """Return how long it has been since planning began."""
        return time.perf_counter() - self._begun

    @property
    def is_over(self) -> bool:
        """Return whether the best that is known has to do."""
        if self.is_interrupted:
            return True
        return self.seconds is not None and self.elapsed_seconds >= self._share * self.seconds

    def give_rest(self) -> None:
        """Have all of the seconds count from now on."""
        self._share = 1.0

    def interrupt(self) -> None:
        """Have it be over now."""
        self.is_interrupted = True
