"""Gives measured allocations the purpose of the recorded ones, by matching the two sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit.trace.events import Allocation

_RUN = 3
_MOST_PASSED_OVER = 96


def align(measured_bytes: Sequence[int], recorded: Sequence[Allocation]) -> list[Allocation | None]:
    """Match measured allocations with recorded ones, in order, by their bytes.

    Both come from the same code, so the sequences agree except where a kernel takes scratch that
    was not recorded, where it asks for its outputs in another order, or where a recorded block was
    never asked for. After a difference, the nearest place is sought where a few entries in a row
    agree again; what was passed over is matched by size alone. None stands for no match.
    """
    matches: list[Allocation | None] = []
    position = 0
    while len(matches) < len(measured_bytes):
        skip, jump = _next_agreement(measured_bytes, recorded, len(matches), position)
        passed_over = measured_bytes[len(matches) : len(matches) + skip]
        matches += _by_size(passed_over, recorded[position : position + jump])
        position += jump
        if len(matches) < len(measured_bytes):
            matches.append(recorded[position] if position < len(recorded) else None)
            position += 1
    return matches


def _next_agreement(
    measured_bytes: Sequence[int], recorded: Sequence[Allocation], begin: int, position: int
) -> tuple[int, int]:
    """Return how many measured and recorded entries to pass over until both agree again."""
    for total in range(_MOST_PASSED_OVER + 1):
        for skip in _from_the_middle(total):
            if _agree(measured_bytes, recorded, begin + skip, position + total - skip):
                return skip, total - skip
    return 1, 0


def _from_the_middle(total: int) -> Iterator[int]:
    """Yield 0 to total, beginning with the middle: differences on both sides are likeliest."""
    return iter(sorted(range(total + 1), key=lambda skip: abs(2 * skip - total)))


def _agree(
    measured_bytes: Sequence[int], recorded: Sequence[Allocation], begin: int, position: int
) -> bool:
    """Return whether a run of entries agrees; at the end of both, a shorter run will do."""
    found = list(measured_bytes[begin : begin + _RUN])
    expected = [block.num_bytes for block in recorded[position : position + _RUN]]
    if len(found) < _RUN and len(found) == len(expected) and begin <= len(measured_bytes):
        return found == expected
    return len(found) == _RUN and found == expected


def _by_size(
    measured_bytes: Sequence[int], recorded: Sequence[Allocation]
) -> list[Allocation | None]:
    """Match entries by their bytes, whatever their order."""
    left = list(recorded)
    matches: list[Allocation | None] = []
    for num_bytes in measured_bytes:
        place = next((i for i, block in enumerate(left) if block.num_bytes == num_bytes), None)
        matches.append(None if place is None else left.pop(place))
    return matches
