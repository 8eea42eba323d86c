"""Bounds the time that a snapshot may take; what is made to take for ever ends with one error."""

from __future__ import annotations

import time

from memfit.errors import DataError


class TimeLimit:
    """Count down processor time from its making.

    Args:
        source: what is read, for the message.
        max_seconds: how long it may take; None means no end.
    """

    def __init__(self, source: str, max_seconds: float | None = None) -> None:
        self._source, self._max_seconds = source, max_seconds
        self._begin_seconds = time.process_time()

    def check(self) -> None:
        """End what takes too long; called once for some dozens of entries.

        Raises:
            DataError: if the time is over.
        """
        if self._max_seconds is None:
            return
        if time.process_time() - self._begin_seconds > self._max_seconds:
            reason = (
                f"it takes more than {self._max_seconds:g} seconds to replay. Record fewer events "
                "with _record_memory_history(max_entries=100000)"
            )
            raise DataError(self._source, reason)
