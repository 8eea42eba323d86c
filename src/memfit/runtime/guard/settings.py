"""How far the guard goes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """Say what the guard may take and when it tries larger plans again."""

    overhead_fraction: float = 0.002
    """The share of the time that writing the file to go back to may take."""
    climb_after_steps: int = 200
    """After so many steps without running out, the plan above is tried again; twice as many after
    each time that it failed. 0 never climbs."""
    folder: Path | None = None
    """Where a checkpoint is written should the card's context be lost; None takes the run's folder,
    or the current one."""
