"""Finds out whether a run that has not said how it ended is still going on."""

from __future__ import annotations

import socket
from enum import StrEnum

import psutil

from memfit.journal.records import RunFacts

_NO_PROCESS = 2**31
"""Numbers from here on are no process's anywhere."""


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
    if facts is None or not is_here or not 0 < facts.process_id < _NO_PROCESS:
        return State.UNKNOWN
    try:
        process = psutil.Process(facts.process_id)
        # One that has ended may only wait for its parent, as often in containers.
        is_dead = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return State.GONE
    except psutil.AccessDenied:
        return State.GOING_ON  # somebody else's
    return State.GONE if is_dead else State.GOING_ON
