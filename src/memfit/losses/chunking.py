"""How finely the losses stream, and which losses a step computes.

Both are context variables, so that a strategy can set the chunk size around a user's own loss
function without that function knowing, and a planner can see what there is to stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from memfit.analysis.separability import PROVED, Separability
from memfit.errors import JobError

_CHUNK_SIZE: ContextVar[int | None] = ContextVar("memfit_chunk_size", default=None)
_NOTES: ContextVar[list[StreamableLoss] | None] = ContextVar("memfit_noted_losses", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamableLoss:
    """Describe one loss that was computed: how many rows it scored against how many candidates."""

    name: str
    num_rows: int
    num_candidates: int
    smallest_chunk: int = 128
    """Fewer candidates at a time save nothing worth their time."""
    separability: Separability = PROVED
    """Whether candidates are treated one by one."""


@contextmanager
def chunked(num_candidates: int) -> Iterator[None]:
    """Stream the losses inside this block, so many candidates at a time.

    The backward pass of a loss uses the chunk size of its forward pass, wherever it is called.

    Raises:
        JobError: if the chunk size is no whole number of at least 1.
    """
    token = _CHUNK_SIZE.set(checked_chunk_size(num_candidates))
    try:
        yield
    finally:
        _CHUNK_SIZE.reset(token)


def chunk_size() -> int | None:
    """Return the candidates per chunk set around here, or None where losses are computed whole."""
    return _CHUNK_SIZE.get()


def checked_chunk_size(num_candidates: object) -> int:
    """Return the chunk size back if it is usable.

    Raises:
        JobError: if the chunk size is no whole number of at least 1.
    """
    if not isinstance(num_candidates, int) or num_candidates < 1:
        msg = (
            f"The chunk size is {num_candidates!r}; needed is a whole number of candidates, "
            "at least 1. Leave it out to compute the loss whole."
        )
        raise JobError(msg)
    return num_candidates


@contextmanager
def noted_losses() -> Iterator[list[StreamableLoss]]:
    """Collect a note of every loss computed inside this block, in order."""
    notes: list[StreamableLoss] = []
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def note_loss(loss: StreamableLoss, look: Callable[[], Separability] = lambda: PROVED) -> None:
    """Tell the surrounding `noted_losses` block, if there is one, that a loss is computed.

    Args:
        loss: without its ``separability``.
        look: finds that out, where somebody wants to know.
    """
    notes = _NOTES.get()
    if notes is not None:
        notes.append(replace(loss, separability=look()))
