"""The data of the chart of memory against time: every plan a point that opens what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.reports.plan_points import PlanPoint, PointKind
from memfit.reports.wording import instead_of
from memfit.units import format_bytes, format_seconds

from .embedding import visible

_KNOWN = {True: "recorded", False: "estimated, not recorded"}


def frontier_chart(
    points: Sequence[PlanPoint], *, budget_bytes: int | None, figure_name: str
) -> dict[str, Any] | None:
    """Return what the chart is drawn from; None where there are no two plans to compare.

    Args:
        points: the plans; the one at index ``i`` is written about in the element ``plan-i``.
        budget_bytes: of the figure.
        figure_name: what the peaks are, such as ``peak allocated``.
    """
    if len(points) < 2:
        return None
    chosen = next((each.strategies for each in points if each.kind is PointKind.CHOSEN), ())
    return {
        "budget": budget_bytes,
        "figure_name": figure_name,
        "points": [
            {
                "id": f"plan-{index}",
                "kind": point.kind.value,
                "bytes": point.peak_bytes,
                "seconds": point.step_seconds,
                "label": visible(_label(point, chosen)),
                "name": visible(point.name),
                "reason": visible(point.reason),
                "known": _KNOWN[point.is_recorded],
            }
            for index, point in enumerate(points)
        ],
    }


def _label(point: PlanPoint, chosen: Sequence[str]) -> str:
    """Name a point by its figures, or by how it differs from the chosen plan."""
    if point.kind in (PointKind.CHOSEN, PointKind.PLAIN):
        figures = f"{format_bytes(point.peak_bytes)}, {format_seconds(point.step_seconds)}"
        return f"{point.kind.value}: {figures}"
    return instead_of(point.strategies, chosen)
