"""Reads what a process takes of the host's memory."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")


def resident_bytes() -> int | None:
    """Give the resident memory of this process; None where the system does not tell."""
    try:
        pages = _STATM.read_bytes().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def resident_peak_bytes() -> int:
    """Give the highest resident size of this process so far (kilobytes on Linux)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
