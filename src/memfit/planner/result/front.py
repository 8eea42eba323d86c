"""The plans that no other beats in both memory and time."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.figures import ParetoPoint

_BEYOND = 1.05
"""An estimate is worth showing where nothing recorded is as good when the estimate is made worse
by this factor in both figures; about so far off estimated times have been seen."""


def pareto(points: Iterable[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """Keep the points that nothing recorded beats, and the chosen one; the fastest first.

    An estimate hides nothing that was recorded, and is kept only where it is clearly beyond.
    """
    points = list(points)
    recorded = _front(point for point in points if point.is_recorded)
    beyond = _front(
        point
        for point in points
        if not point.is_recorded and not any(_is_near_or_beaten(point, by) for by in recorded)
    )
    return tuple(sorted([*recorded, *beyond], key=_by_time))


def _front(points: Iterable[ParetoPoint]) -> list[ParetoPoint]:
    """Keep the points that no other beats, and the chosen one."""
    found: list[ParetoPoint] = []
    least_bytes: int | None = None
    for point in sorted(points, key=_by_time):
        if point.is_chosen or least_bytes is None or point.peak_bytes < least_bytes:
            found.append(point)
            least_bytes = min(point.peak_bytes, least_bytes or point.peak_bytes)
    return found


def _by_time(point: ParetoPoint) -> tuple[float, int, bool]:
    return point.step_seconds, point.peak_bytes, not point.is_chosen


def _is_near_or_beaten(estimate: ParetoPoint, recorded: ParetoPoint) -> bool:
    return (
        recorded.peak_bytes <= _BEYOND * estimate.peak_bytes
        and recorded.step_seconds <= _BEYOND * estimate.step_seconds
    )
