"""The data of the charts of a run: peaks over its steps, metrics over its epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memfit.journal.records import StepRecord
from memfit.journal.timeline import kept_events
from memfit.reports.plots import BLUE, BUDGET_IN_VIEW, CYAN, GREEN, PURPLE, RED, YELLOW
from memfit.reports.run_contents import RunReport
from memfit.reports.run_plots import marked_steps, peaks_of_ranks

_MOST_POINTS = 2000
_METRIC_COLOURS = (RED, BLUE)
_BYTES: tuple[tuple[str, str, str, Callable[[StepRecord], int | None]], ...] = (
    ("predicted peak allocated", PURPLE, "band", lambda step: step.predicted_peak_bytes),
    ("peak reserved", CYAN, "dotted", lambda step: step.peak_reserved_bytes),
    ("peak allocated", BLUE, "solid", lambda step: step.peak_allocated_bytes),
)


def run_chart(report: RunReport) -> dict[str, Any] | None:
    """Return what the chart of a run's peaks is drawn from; None where nothing was measured.

    Of several ranks, the one with the highest peak is shown.
    """
    rank = report.highest_rank.rank
    steps = report.steps[rank]
    peaks = [_line(steps, *each) for each in _BYTES]
    host = _line(steps, "host", YELLOW, "solid", lambda step: step.host_bytes)
    whose = "" if len(report.ranks) == 1 else f", rank {rank}, the highest of {len(report.ranks)}"
    panels = []
    if any(line["y"] for line in peaks[1:]):
        lines = [line for line in peaks if line["y"]]
        panels.append(_panel(f"Peak of each step{whose}", lines, 1.4, report.budget_bytes))
    if host["y"]:
        panels.append(_panel("Resident memory of the process", [host], 0.7))
    if not panels:
        return None
    return {"along": "step", "panels": panels, "events": _events(report, rank)}


def _panel(
    title: str, lines: Sequence[dict[str, Any]], weight: float, budget_bytes: int | None = None
) -> dict[str, Any]:
    top = max((value for line in lines for value in line["y"] if value is not None), default=0)
    is_near = budget_bytes is not None and budget_bytes <= BUDGET_IN_VIEW * top
    return {
        "title": title,
        "is_bytes": True,
        "weight": weight,
        "lines": lines,
        "budget": budget_bytes if is_near else None,
    }


def _line(
    steps: Sequence[StepRecord],
    name: str,
    colour: str,
    style: str,
    value: Callable[[StepRecord], int | None],
) -> dict[str, Any]:
    """Take the known values of a figure, thinned so that lows and highs stay."""
    known = [(step.step, found) for step in steps if (found := value(step)) is not None]
    kept = kept_events([found for _, found in known], _MOST_POINTS)
    return {
        "name": name,
        "colour": colour,
        "style": style,
        "x": [known[index][0] for index in kept],
        "y": [known[index][1] for index in kept],
    }


def _events(report: RunReport, rank: int) -> list[dict[str, Any]]:
    """List what happened, by kind."""
    kinds = [
        ("out of memory", RED, "diamond", [told.event.step for told in report.out_of_memory]),
        ("larger plan again", GREEN, "triangle", [told.event.step for told in report.climbs]),
        ("leak found", PURPLE, "pin", [t.event.step for t in report.leaks if t.rank == rank]),
    ]
    return [
        {
            "name": name,
            "colour": colour,
            "symbol": symbol,
            "steps": marked_steps(steps),
            "count": len(steps),
        }
        for name, colour, symbol, steps in kinds
        if steps
    ]


def metrics_chart(
    metrics: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Any] | None:
    """Return what the chart of these metrics is drawn from; None where there are none.

    Args:
        metrics: a row per epoch or step.
        names: what to draw of them, a panel each.
    """
    if not names:
        return None
    along = "step" if "step" in metrics[0] else "epoch"
    panels = []
    for name, colour in zip(names, _METRIC_COLOURS, strict=False):
        points = [
            (row.get(along, number), row[name])
            for number, row in enumerate(metrics, start=1)
            if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])
        ]
        points = [points[i] for i in kept_events([value for _, value in points], _MOST_POINTS)]
        line = {
            "name": name.replace("_", " "),
            "colour": colour,
            "style": "solid",
            "x": [point[0] for point in points],
            "y": [point[1] for point in points],
        }
        title = name.replace("_", " ")
        panels.append(
            {"title": title, "is_bytes": False, "weight": 0.8, "lines": [line], "budget": None}
        )
    return {"along": along, "panels": panels, "events": []}


def ranks_chart(report: RunReport) -> dict[str, Any] | None:
    """Return what the bars of several ranks are drawn from; None where there are none."""
    bars = [
        {"name": name, "colour": colour, "values": values}
        for name, colour, values in peaks_of_ranks(report)
    ]
    names = [str(rank.rank) for rank in report.ranks]
    return {"along": "rank", "names": names, "bars": bars} if bars else None
