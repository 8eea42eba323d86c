"""Finds everything that a job's code can reach and change, keeps it and puts it back."""

from memfit.session.live_state.findings import Change, Obstacle
from memfit.session.live_state.state import LiveState, Snapshot

__all__ = ["Change", "LiveState", "Obstacle", "Snapshot"]
