"""Reads clips side by side and ahead of the steps, which wait less and get the same batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from torch import Tensor

from .clips import Clip, Clips, collate, stack

_NOTABLE_SHARE = 1 / 3
"""Of the time of an epoch, from which on waiting for clips is said."""


class ClipReader:
    """Batches of one part's clips, the next one under way while a step uses the one before.

    A clip depends on its number alone, so what was read ahead and what is read anew after a
    continuation are the same. One batch is read ahead, which is what it takes of the host's memory.

    Args:
        clips: of one part.
        pool: reads side by side and ahead; None reads in the training thread.
        read: puts a batch together, without a pool; by default clips are read whole.
    """

    def __init__(
        self,
        clips: Clips,
        pool: ThreadPoolExecutor | None = None,
        read: Callable[[Sequence[int]], dict[str, Tensor]] | None = None,
    ) -> None:
        self.clips = clips
        self.waited_seconds = 0.0
        """Since the reader was made."""
        self._pool = pool
        self._read = read or partial(collate, clips)
        self._begun: dict[int, Future[Clip]] = {}

    def batch(self, rows: Sequence[int], following: Sequence[int] = ()) -> dict[str, Tensor]:
        """Return the batch of these rows, and begin with the rows that follow.

        Raises:
            DataError: if a clip cannot be read, as its record's line says.
        """
        begin = time.perf_counter()
        try:
            if self._pool is None:
                return self._read(rows)
            begun = self._begun
            waiting = [begun.get(row) or self._pool.submit(self.clips.clip, row) for row in rows]
            self._begun = {row: self._pool.submit(self.clips.clip, row) for row in following}
            return stack(self.clips, [future.result() for future in waiting])
        finally:
            self.waited_seconds += time.perf_counter() - begin

    def batches(self, batch_size: int) -> Iterator[dict[str, Tensor]]:
        """Yield all clips in their order, so many at a time."""
        starts = range(0, len(self.clips), batch_size)
        rows = [range(start, min(start + batch_size, len(self.clips))) for start in starts]
        for place, here in enumerate(rows):
            yield self.batch(here, rows[place + 1] if place + 1 < len(rows) else ())


class WaitingWatch:
    """Tells once when steps wait for clips, with what to do about it."""

    def __init__(self, reader: ClipReader, num_workers: int) -> None:
        self._reader = reader
        self._num_workers = num_workers
        self._waited_seconds = 0.0
        self._is_said = False

    def epoch_done(self, epoch_seconds: float) -> str | None:
        """Take the seconds of an epoch's steps, batches among them; return what to say."""
        waited_seconds = self._reader.waited_seconds - self._waited_seconds
        self._waited_seconds = self._reader.waited_seconds
        if self._is_said or waited_seconds < _NOTABLE_SHARE * epoch_seconds:
            return None
        self._is_said = True
        remedy = (
            "more of them, or clips stored smaller (arrays of the model's height and width)"
            if self._num_workers
            else "--num-workers 2 reads clips while steps are computed"
        )
        share = waited_seconds / epoch_seconds
        return (
            f"Steps waited for clips in {share:.0%} of the epoch, with --num-workers "
            f"{self._num_workers}; {remedy}."
        )
