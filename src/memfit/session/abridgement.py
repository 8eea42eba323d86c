"""Recording a few of many pieces that are alike, for estimates and for steps that take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_MOST_PIECES: ContextVar[int | None] = ContextVar("most_pieces", default=None)


@contextmanager
def few_pieces(most: int) -> Iterator[None]:
    """Have no more than some pieces of a call recorded; real steps run all of them.

    Args:
        most: how many, at least 4. Memory is that of all pieces, operators are those of the few.
    """
    token = _MOST_PIECES.set(most)
    try:
        yield
    finally:
        _MOST_PIECES.reset(token)


def left_out(num_pieces: int) -> range:
    """Get the numbers of the pieces to leave out: in the middle, as the first and last differ."""
    most = _MOST_PIECES.get()
    if most is None or num_pieces <= most:
        return range(0)
    return range(most // 2, num_pieces - (most - most // 2))
