"""The data of the charts of one step: bytes over its events, and who holds them at each moment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from memfit.figures import Timeline
from memfit.reports.plots import CATEGORY_COLOURS, OTHER_COLOUR, ordered_categories
from memfit.reports.timeline_points import downsample, phase_spans

from .embedding import visible

if TYPE_CHECKING:
    from memfit.prediction.lives import Life  # it needs torch

_MOST_POINTS = 2000
_MOST_LIVES = 15_000
"""What is smaller is shown together: its bytes are the total less those of all others."""


def step_chart(
    shown: Timeline | None,
    other: Timeline | None = None,
    *,
    names: tuple[str, str] = ("predicted", "measured"),
    budget_bytes: int | None = None,
    lives: Sequence[Life] = (),
) -> dict[str, Any] | None:
    """Return what the chart of a step is drawn from; None where there is no timeline.

    Args:
        shown: stacked by category.
        other: drawn by its total alone, on the same axis.
        names: of both.
        budget_bytes: a line across.
        lives: of the blocks behind ``shown``.
    """
    if shown is None or not shown.allocated_bytes:
        return None
    axis = shown.axis()
    content: dict[str, Any] = {
        "name": names[0],
        **_points(shown),
        "parts": _parts(shown),
        "phases": [
            {"name": span.name, "begin": span.start, "end": span.end} for span in phase_spans(shown)
        ],
        "last": max(axis[-1], other.axis()[-1] if other and other.allocated_bytes else 0),
        "budget": budget_bytes,
        "other": None,
        "lives": _lives(lives, _peak_place(shown)) if lives else None,
    }
    if other is not None and other.allocated_bytes:
        content["other"] = {"name": names[1], **_points(other)}
    return content


def _points(timeline: Timeline) -> dict[str, list[float]]:
    thinned = downsample(timeline, _MOST_POINTS)
    return {"x": list(thinned.axis()), "total": list(thinned.allocated_bytes)}


def _parts(timeline: Timeline) -> list[dict[str, Any]]:
    thinned = downsample(timeline, _MOST_POINTS)
    return [
        {
            "name": name,
            "colour": CATEGORY_COLOURS.get(name, OTHER_COLOUR),
            "values": list(thinned.by_category[name]),
        }
        for name in ordered_categories(thinned)
    ]


def _peak_place(timeline: Timeline) -> float:
    totals = timeline.allocated_bytes
    return timeline.axis()[max(range(len(totals)), key=totals.__getitem__)]


def _lives(lives: Sequence[Life], peak: float) -> dict[str, Any]:
    """Put lives in columns: those at the peak first, then the largest, up to what a page holds."""
    ordered = sorted(lives, key=lambda life: (not life.begin <= peak < life.end, -life.num_bytes))
    kept = list(islice(ordered, _MOST_LIVES))
    names: dict[str, int] = {}
    columns: dict[str, list[int]] = {
        "begin": [life.begin for life in kept],
        "end": [life.end for life in kept],
        "bytes": [life.num_bytes for life in kept],
        "blocks": [life.num_blocks for life in kept],
        "category": [names.setdefault(life.category, len(names)) for life in kept],
        "module": [names.setdefault(life.module, len(names)) for life in kept],
        "line": [names.setdefault(life.source_line, len(names)) for life in kept],
    }
    return {"names": [visible(name) for name in names], **columns}
