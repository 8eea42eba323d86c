"""Finds everything that a job's code can reach and change, keeps it and puts it back."""

from memfit.session.live_state.findings import Change, ChangeKind, Obstacle
from memfit.session.live_state.snapshot import Snapshot
from memfit.session.live_state.state import LiveState

__all__ = ["Change", "ChangeKind", "LiveState", "Obstacle", "Snapshot"]
