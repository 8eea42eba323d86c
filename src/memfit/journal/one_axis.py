"""Lays one timeline of a step along another one, so that what is equal lies on each other.

A measured step has events that a predicted one lacks, such as scratch of a few bytes that comes and
goes. Counted one by one, the two drift apart although every total of the prediction is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

from memfit.figures import Timeline

_WINDOWS = (64, 256)
"""How far the next equal total is sought: near first, since it mostly is."""
_BOTH_SIDES = 16
"""What passing over an event of both sides costs more than one that only one side has."""
_REST = 64
"""After a search in vain, so many events go by before the next."""
_LEAST_ALIKE = 0.5
"""Below this share of equal totals the steps are laid beside each other phase by phase."""


def laid_along(timeline: Timeline, other: Timeline) -> Timeline:
    """Return a timeline with places among the events of another one, in the order that it has.

    An event with the total of one of the other's has its place; what comes between two of those
    lies between their places. A timeline that has places already, or equal totals, stays as it is.
    """
    totals, others = timeline.allocated_bytes, other.allocated_bytes
    if timeline.places or other.places or not totals or not others or totals == others:
        return timeline
    pairs = list(_equal_totals(others, totals))
    if len(pairs) < _LEAST_ALIKE * min(len(totals), len(others)):
        pairs = _equal_phases(other, timeline)
    places = _between([(-1, -1), *pairs, (len(others), len(totals))])
    return replace(timeline, places=places)


def _equal_totals(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of events with the same total, in order."""
    i = j = rests_until = 0
    while i < len(first) and j < len(second):
        if first[i] != second[j]:
            found = None if i < rests_until else _next_equal(first, second, i, j)
            if found is None:
                if i >= rests_until:
                    rests_until = i + _REST
                i, j = i + 1, j + 1
                continue
            i, j = found
        yield i, j
        i, j = i + 1, j + 1


def _next_equal(
    first: Sequence[int], second: Sequence[int], i: int, j: int
) -> tuple[int, int] | None:
    """Find the nearest place where both totals are equal again, passing over little."""
    for window in _WINDOWS:
        ahead: dict[int, int] = {}
        for jump, total in enumerate(second[j : j + window]):
            ahead.setdefault(total, jump)
        found = [
            (skip, ahead[total])
            for skip, total in enumerate(first[i : i + window])
            if total in ahead
        ]
        if found:
            skip, jump = min(found, key=lambda pair: sum(pair) + _BOTH_SIDES * min(pair))
            return i + skip, j + jump
    return None


def _equal_phases(first: Timeline, second: Timeline) -> list[tuple[int, int]]:
    """Pair the beginnings of phases up to the first that differs, and the ends of the steps."""
    alike = takewhile(
        lambda pair: pair[0][1] == pair[1][1], zip(first.phases, second.phases, strict=False)
    )
    last = len(first.allocated_bytes) - 1, len(second.allocated_bytes) - 1
    begins = [(min(one[0], last[0]), min(other[0], last[1])) for one, other in alike]
    pairs = [(0, 0)]
    for pair in (*begins, last):
        if pair[0] > pairs[-1][0] and pair[1] > pairs[-1][1]:
            pairs.append(pair)
    return pairs


def _between(anchors: Sequence[tuple[int, int]]) -> list[float]:
    """Return the places of all events between anchors: pairs of a place and an event."""
    places: list[float] = []
    for (place, event), (next_place, next_event) in pairwise(anchors):
        step = (next_place - place) / (next_event - event)
        places += [max(0, round(place + step * k, 2)) for k in range(next_event - event)]
    return places[1:]  # the first anchor is the event before the first
