"""One process at a time has the card: whoever measures holds a lock on a file."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = "MEMFIT_CARD_LOCK"
"""Names the file in the environment; without it nobody waits."""


@contextmanager
def card_alone(most_seconds: int = 0) -> Iterator[None]:
    """Wait for the card, and end this process where it holds it for too long; 0 sets no bound."""
    path = os.environ.get(LOCK)
    if not path:
        yield
        return
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if most_seconds:
            signal.alarm(most_seconds)
        try:
            yield
        finally:
            if most_seconds:
                signal.alarm(0)
            fcntl.flock(file, fcntl.LOCK_UN)
