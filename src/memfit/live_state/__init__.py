"""Finds everything that a job's code can reach and change, keeps it and puts it back."""

from memfit.live_state.findings import Change, ChangeKind, Obstacle
from memfit.live_state.reading import Reading, read
from memfit.live_state.snapshot import Snapshot
from memfit.live_state.state import LiveState

__all__ = ["Change", "ChangeKind", "LiveState", "Obstacle", "Reading", "Snapshot", "read"]
