"""The data of charts of memory against time: a plan or a device is a point to open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memfit.reports.plan_points import PlanPoint, PointKind
from memfit.reports.wording import instead_of, verdict
from memfit.units import format_bytes, format_seconds

from .embedding import visible

if TYPE_CHECKING:
    from memfit.prediction.compared_cards import ComparedCard  # it needs torch

_PLANS = (
    {"kind": "recorded", "name": "recorded", "size": 11, "colour": "--bar-planned"},
    {
        "kind": "estimated",
        "name": "estimated",
        "size": 10,
        "colour": "--bar-planned",
        "hollow": True,
    },
    {
        "kind": "plain",
        "name": "plain step",
        "size": 12,
        "colour": "--muted",
        "symbol": "rect",
        "z": 5,
    },
    {"kind": "chosen", "name": "chosen", "size": 16, "colour": "--bad", "z": 6},
)
"""How the points of each kind look, in the order of the legend."""
_CARDS = (
    {"kind": "yes", "name": "fits", "size": 11, "colour": "--good"},
    {"kind": "uncertain", "name": "uncertain", "size": 11, "colour": "--guess"},
    {"kind": "no", "name": "does not fit", "size": 10, "colour": "--bad", "hollow": True},
)
_MOST_LABELS = 24
"""Of more devices only those that nothing beats have their names in the picture."""
_LABEL_PIXELS = 190
"""Longer labels are cut."""
_MOST_CHARACTERS = int(_LABEL_PIXELS / 7.3)
"""About as many of a label are shown, at 12 px."""
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
    labels = _without_repeats([_label(point, chosen) for point in points])
    return {
        "mark": {"bytes": budget_bytes, "label": f"budget {format_bytes(budget_bytes)}"}
        if budget_bytes
        else None,
        "label_pixels": _LABEL_PIXELS,
        "figure_name": figure_name,
        "line": {"name": "fastest recorded for each budget", "without": PointKind.ESTIMATED.value},
        "kinds": _kinds(points),
        "points": [
            {
                "id": f"plan-{index}",
                "kind": point.kind.value,
                "bytes": point.peak_bytes,
                "seconds": point.step_seconds,
                "label": visible(label),
                "name": visible(point.name),
                "reason": visible(point.reason),
                "known": _KNOWN[point.is_recorded],
            }
            for index, (point, label) in enumerate(zip(points, labels, strict=True))
        ],
    }


def _kinds(points: Sequence[PlanPoint]) -> list[dict[str, Any]]:
    """Return how the points look, each kind by the name that its points have."""
    roles = {point.kind.value: point.role for point in points if point.kind is PointKind.CHOSEN}
    return [{**each, "name": roles.get(str(each["kind"]), each["name"])} for each in _PLANS]


def cards_chart(cards: Sequence[ComparedCard]) -> dict[str, Any] | None:
    """Return what a chart of devices is drawn from; None where there are no two to compare.

    The device at index ``i`` is written about in the element ``plan-i``.
    """
    if len(cards) < 2:
        return None
    needed = sorted(each.needed_bytes for each in cards)[len(cards) // 2]
    has_room = len(cards) <= _MOST_LABELS
    return {
        "mark": {"bytes": needed, "label": f"needs {format_bytes(needed)}"},
        "label_pixels": _LABEL_PIXELS,
        "figure_name": "memory of the device",
        "line": {"name": "fastest for each memory", "without": "no"},
        "kinds": _CARDS,
        "scale": "log",
        "points": [
            {
                "id": f"plan-{index}",
                "kind": verdict(each.prediction),
                "bytes": each.memory_bytes,
                "seconds": each.prediction.step_seconds,
                "label": visible(each.prediction.device)
                if has_room or _is_best(each, cards)
                else "",
                "name": visible(f"{each.prediction.device}: {each.title}"),
                "reason": f"needs {format_bytes(each.needed_bytes)}",
                "known": f"speeds: {each.seconds_certainty.value}",
            }
            for index, each in enumerate(cards)
        ],
    }


def _is_best(card: ComparedCard, cards: Sequence[ComparedCard]) -> bool:
    """Return whether no device with as little memory, on which the step fits, is as fast."""
    if card.prediction.fits is False:
        return False
    return not any(
        other.memory_bytes <= card.memory_bytes
        and other.prediction.step_seconds <= card.prediction.step_seconds
        for other in cards
        if other is not card and other.prediction.fits is not False
    )


def _label(point: PlanPoint, chosen: Sequence[str]) -> str:
    """Name a point by its figures, or by how it differs from the chosen plan."""
    if point.kind in (PointKind.CHOSEN, PointKind.PLAIN):
        figures = f"{format_bytes(point.peak_bytes)}, {format_seconds(point.step_seconds)}"
        return f"{point.role}: {figures}"
    return instead_of(point.strategies, chosen)


def _without_repeats(labels: Sequence[str]) -> list[str]:
    """Leave out what would look like a label before it: a dozen of the same say nothing more."""
    seen: set[str] = set()
    kept = []
    for label in labels:
        shown = label[:_MOST_CHARACTERS]
        kept.append("" if shown in seen else label)
        seen.add(shown)
    return kept
