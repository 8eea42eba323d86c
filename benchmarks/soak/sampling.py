"""Notes what a process holds, every so many steps, as lines of JSON."""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

_PAGE_BYTES = 4096
_OBJECTS_PARTS = 10
"""So many times in a run all objects are looked at, which takes a second."""


class Samples:
    """Write samples of a process's memory to a file.

    Args:
        path: of the file.
        num_steps: that the run has.
        every: how many steps lie between two samples.
    """

    def __init__(self, path: Path, num_steps: int, every: int) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._every = every
        self._objects_every = max(every, num_steps // _OBJECTS_PARTS // every * every)
        self._spent_seconds = 0.0

    def take(self, step: int, **more: float) -> None:
        """Note a sample, if it is time for one.

        Args:
            step: that was done.
            more: figures to note with it.
        """
        if step % self._every:
            return
        processor_seconds = time.process_time() - self._spent_seconds
        began_seconds = time.process_time()
        objects_bytes = _objects_bytes() if step % self._objects_every == 0 else None
        sample = {
            "step": step,
            "processor_seconds": processor_seconds,
            "resident_bytes": _resident_bytes(),
            "python_blocks": sys.getallocatedblocks(),
            "objects_bytes": objects_bytes,
            **more,
        }
        self._file.write(f"{json.dumps(sample)}\n")
        self._file.flush()
        self._spent_seconds += time.process_time() - began_seconds


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def _objects_bytes() -> int:
    """Return what all of Python's objects take: those that are tracked, and what they hold."""
    gc.collect()
    held: dict[int, int] = {}
    for each in gc.get_objects():
        held[id(each)] = _size_of(each)
        for inner in gc.get_referents(each):
            if not gc.is_tracked(inner) and id(inner) not in held:
                held[id(inner)] = _size_of(inner)
    return sum(held.values())


def _size_of(found: object) -> int:
    try:
        return sys.getsizeof(found)
    except (TypeError, RuntimeError, ReferenceError):  # a class or proxy that says none
        return 0
