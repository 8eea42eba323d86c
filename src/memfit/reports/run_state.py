"""Finds out whether a run that has not said how it ended is still going on."""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from pathlib import Path

from memfit.journal.records import RunFacts


class State(StrEnum):
    """Say where a run stands."""

    ENDED = "ended"
    GOING_ON = "going-on"
    """No ending was written, and its process is there."""
    GONE = "gone"
    """No ending was written, and its process is not there any more."""
    UNKNOWN = "unknown"
    """No ending was written, and nobody here can tell whether its process is there."""


def state_of(facts: RunFacts | None) -> State:
    """Look for the process of a run without an ending."""
    is_here = facts is not None and facts.host_name in ("", socket.gethostname())
    if facts is None or not is_here or facts.process_id <= 0:
        return State.UNKNOWN
    try:
        os.kill(facts.process_id, 0)
    except ProcessLookupError:
        return State.GONE
    except PermissionError:
        return State.GOING_ON  # somebody else's
    except (OverflowError, OSError):
        return State.UNKNOWN
    return State.GONE if _is_dead(facts.process_id) else State.GOING_ON


def _is_dead(process_id: int) -> bool:
    """Return whether a process has ended and only waits for its parent, as often in containers."""
    try:
        line = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False  # no such files here, or gone a moment ago
    # The state follows the name, which may hold brackets itself (proc(5)).
    return line.rpartition(")")[2].split()[:1] == ["Z"]
