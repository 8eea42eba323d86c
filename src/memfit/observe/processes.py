"""Looks at processes: what they have resident, which are below them, when they were started."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")
_LEAST_SECONDS = 0.1


class ResidentMemory:
    """Read the resident memory of this process, at most ten times a second."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._read_seconds = -_LEAST_SECONDS
        self._num_bytes = 0

    def num_bytes(self) -> int:
        """Return the resident memory."""
        now_seconds = time.monotonic()
        if now_seconds - self._read_seconds >= _LEAST_SECONDS:
            self._read_seconds = now_seconds
            self._num_bytes = int(self._process.memory_info().rss)
        return self._num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMemory:
    """What a process and all below it have resident."""

    process_ids: tuple[int, ...]
    resident_bytes: int
    """Added up: what processes share counts for each."""


def tree_memory(process_id: int) -> TreeMemory:
    """Add up the resident memory of a process and of all below it."""
    found: list[int] = []
    pending = [process_id]
    while pending:
        current = pending.pop()
        found.append(current)
        pending.extend(children(current))
    resident = sum(resident_bytes(each) for each in found)
    return TreeMemory(process_ids=tuple(found), resident_bytes=resident)


def resident_bytes(process_id: int, *, without_shared: bool = False) -> int:
    """Return the resident memory of a process; 0 where it is gone or not ours to read."""
    try:
        memory = psutil.Process(process_id).memory_info()
    except psutil.Error:
        return 0
    return int(memory.rss - (getattr(memory, "shared", 0) if without_shared else 0))


def children(process_id: int) -> list[int]:
    """Return the ids of the child processes that run now; nothing where /proc does not tell.

    psutil reads every process of the machine for this, which takes 50 microseconds each; it is
    asked for four times a second.
    """
    found: list[int] = []
    try:
        for task in (_PROC / str(process_id) / "task").iterdir():
            found += map(int, (task / "children").read_text("ascii").split())
    except OSError:
        return found  # it ended meanwhile
    return found


def started_at(process_id: int) -> int | None:
    """Return when a process was started, in clock ticks; None if there is none of that id.

    Ids are used again; together with this they are not. psutil gives the time of day instead,
    which differs from one process that asks to the next where the clock was set in between.
    """
    try:
        stat = (_PROC / str(process_id) / "stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    is_gone = fields[0] in {"Z", "X"}
    return None if is_gone else int(fields[19])
