"""Scores rows in processes of their own, so that one that fails or hangs costs no other row.

A process takes row after row, because importing takes longer than most rows; after a failure the
next row gets a new one.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from memfit.errors import MemfitError

from .rows import Row, read_rows
from .scoring import Predicted, predict_row

_LIMIT_SECONDS = 600.0
Place = tuple[Path, int]
"""A row by its file and its position among that file's rows."""


def predict_rows(
    places: Sequence[Place], num_processes: int
) -> Iterator[tuple[int, Predicted | str]]:
    """Yield each row's position in ``places`` and its prediction, or why there is none."""
    waiting = deque(enumerate(places))
    workers = [_Worker() for _ in range(min(num_processes, len(places)))]
    try:
        while waiting or any(worker.is_busy for worker in workers):
            for worker in workers:
                if waiting and not worker.is_busy:
                    worker.give(*waiting.popleft())
            busy = [worker for worker in workers if worker.is_busy]
            left = min(_LIMIT_SECONDS - worker.busy_seconds for worker in busy)
            wait([worker.connection for worker in busy], timeout=max(0.0, left))
            for worker in busy:
                answer = worker.answer()
                if answer is not None:
                    yield answer
                    if isinstance(answer[1], str):
                        workers[workers.index(worker)] = worker.replaced()
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """One process and the row it is at."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._position: int | None = None
        self._started = 0.0

    @property
    def is_busy(self) -> bool:
        return self._position is not None

    @property
    def busy_seconds(self) -> float:
        return time.monotonic() - self._started

    def give(self, position: int, place: Place) -> None:
        """Have a row predicted."""
        self._position, self._started = position, time.monotonic()
        with suppress(OSError):  # a process that is gone is found out when it is asked
            self.connection.send(place)

    def answer(self) -> tuple[int, Predicted | str] | None:
        """Return the row's position with its prediction or failure; None while it is under way."""
        position = self._position
        assert position is not None, "only a worker with a row is asked"
        found: Predicted | str
        if self.connection.poll():
            try:
                found = self.connection.recv()
            except EOFError:
                self._process.join()
                found = f"its process ended with code {self._process.exitcode}"
        elif self.busy_seconds >= _LIMIT_SECONDS:
            found = f"it took longer than {_LIMIT_SECONDS:.0f} s"
        else:
            return None
        self._position = None
        return position, found

    def replaced(self) -> _Worker:
        """End this process and give a new one."""
        self.end()
        return _Worker()

    def end(self) -> None:
        """End the process, whatever it is at."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection) -> None:
    """Predict row after row until nobody asks any more."""
    os.dup2(2, 1)  # what libraries print must not mix with the table
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    while True:
        try:
            path, position = connection.recv()
        except EOFError:
            return
        connection.send(_predicted_or_failure(_rows_of(path)[position]))
        gc.collect()


def _predicted_or_failure(row: Row) -> Predicted | str:
    try:
        return predict_row(row)
    except MemfitError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - any code may run in a row, which is then named
        return f"{type(error).__name__}: {error}"


@cache
def _rows_of(path: Path) -> tuple[Row, ...]:
    return read_rows(path)
