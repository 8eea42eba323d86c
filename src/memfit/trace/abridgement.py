"""Recording a few of many pieces that are alike, for estimates and for steps that take long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class Abridgement:
    """How many pieces there were, and how many of them were recorded."""

    most_pieces: int
    num_pieces: int = 0
    num_recorded: int = 0
    num_loops: int = 0
    """Loops over pieces that have begun, where a step has several."""

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return what was counted so far: pieces, those recorded, and loops."""
        return self.num_pieces, self.num_recorded, self.num_loops

    @property
    def num_left_out(self) -> int:
        """Count the pieces that were not recorded."""
        return self.num_pieces - self.num_recorded


_IN_FORCE: ContextVar[Abridgement | None] = ContextVar("abridgement", default=None)


@contextmanager
def few_pieces(most: int) -> Iterator[Abridgement]:
    """Have no more than some pieces of a call recorded; real steps run all of them.

    Args:
        most: how many, at least 4. Memory is that of all pieces, operators are those of the few.
    """
    found = Abridgement(most)
    token = _IN_FORCE.set(found)
    try:
        yield found
    finally:
        _IN_FORCE.reset(token)


def is_abridged() -> bool:
    """Return whether only a few pieces are recorded now."""
    return _IN_FORCE.get() is not None


def left_out(num_pieces: int) -> range:
    """Get the numbers of the pieces to leave out: in the middle, as the first and last differ."""
    found = _IN_FORCE.get()
    if found is None:
        return range(0)
    most = found.most_pieces
    skipped = range(most // 2, max(most // 2, num_pieces - (most - most // 2)))
    found.num_pieces += num_pieces
    found.num_recorded += num_pieces - len(skipped)
    return skipped


def few_of(pieces: Sequence[T]) -> Sequence[T]:
    """Begin one of several loops of a step over pieces, and return those that it runs."""
    found = _IN_FORCE.get()
    if found is None:
        return pieces
    found.num_loops += 1
    skipped = left_out(len(pieces))
    return [piece for number, piece in enumerate(pieces) if number not in skipped]


def counted() -> tuple[int, int, int]:
    """Return the counts so far of what is abridged; zeros where nothing is."""
    found = _IN_FORCE.get()
    return (0, 0, 0) if found is None else found.counts


def count_again(begin: tuple[int, int, int], end: tuple[int, int, int]) -> None:
    """Count once more what came between two readings of ``counted``."""
    found = _IN_FORCE.get()
    if found is not None:
        found.num_pieces += end[0] - begin[0]
        found.num_recorded += end[1] - begin[1]
        found.num_loops += end[2] - begin[2]


def current_loop() -> int:
    """Return the number of the loop that has begun last; 0 outside of loops that are counted."""
    found = _IN_FORCE.get()
    return 0 if found is None else found.num_loops
