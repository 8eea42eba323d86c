"""What a scan of a script's training data found: plain data that goes between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memfit.session.batch_shapes import BatchShape

NO_LOADER = "no DataLoader was read while its steps were recorded"
NO_FETCH = "the loop made its updates without asking its DataLoader for another batch"
UNREADABLE = "the DataLoader failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """A batch whose own step was recorded."""

    position: int
    """In the epoch, from 0."""
    shape: int
    """Its place among the distinct shapes."""
    step: int
    """The recorded step, from 0."""
    is_confirmed: bool
    """Whether a module of that step was called with a tensor of the batch's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedData:
    """The shapes of the batches of an epoch, in order, and the steps that were recorded of some."""

    shapes: Sequence[BatchShape] = ()
    """The distinct ones."""
    order: Sequence[int] = ()
    """Of each batch in the order of the epoch, its place among the shapes."""
    is_complete: bool = False
    scan_seconds: float = 0.0
    recorded: Sequence[RecordedBatch] = ()
    """What was handed to the script's own loop, the largest batch first."""
    num_steps_before: int = 0
    """Recorded before the scan began."""
    largest: int = 0
    """The position of the largest batch by elements."""
    num_not_recorded: int = 0
    """Batches that the loop ended too early for."""
    reason: str = ""
    """Why there was nothing to scan, or why the scan ended early."""
