"""Looks at the processes below another one, through ``/proc``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


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
        pending.extend(_children(current))
    resident = sum(_resident_bytes(each) for each in found)
    return TreeMemory(process_ids=tuple(found), resident_bytes=resident)


def started_at(process_id: int) -> int | None:
    """Return when a process was started, in clock ticks; None if there is none of that id.

    Ids are used again; together with this they are not.
    """
    try:
        stat = (_PROC / str(process_id) / "stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    is_gone = fields[0] in {"Z", "X"}
    return None if is_gone else int(fields[19])


def _children(process_id: int) -> list[int]:
    children: list[int] = []
    try:
        for task in (_PROC / str(process_id) / "task").iterdir():
            children += map(int, (task / "children").read_text("ascii").split())
    except OSError:
        return children  # it ended meanwhile
    return children


def _resident_bytes(process_id: int) -> int:
    try:
        pages = (_PROC / str(process_id) / "statm").read_text("ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
