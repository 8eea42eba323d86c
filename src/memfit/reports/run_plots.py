"""Pictures of a run: memory over its steps, one step by category, and ranks side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memfit.figures import Timeline
from memfit.journal.records import StepRecord
from memfit.journal.timeline import kept_events

from .plots import (
    BLUE,
    BUDGET_IN_VIEW,
    BUDGET_LINE,
    CYAN,
    GREEN,
    INK,
    LINE,
    MUTED,
    PURPLE,
    RED,
    YELLOW,
    budget_label,
    count_along,
    draw_legend,
    new_figure,
    say_empty,
    scale_bytes,
    style_axes,
    timeline_figure,
)
from .run_contents import RankSummary, RunReport
from .training import Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTTED: Any = (0, (4, 1.2))
_STEPS = "steps-post"
_HEADROOM = 1.22
_MARKER_HEIGHT = 0.94
_MARKED_POINTS = 40
_MOST_POINTS, _MOST_MARKS = 2000, 400
"""Of a line, and of one kind of event: a wide screen has no more columns for them."""
"""So few points are shown one by one."""
_BAR_WIDTH = 0.38
Points = tuple[list[float], list[float]]
"""Steps and bytes."""


def has_memory(report: RunReport) -> bool:
    """Return whether any step tells something about memory."""
    return any(
        value is not None
        for steps in report.steps.values()
        for step in steps
        for value in (step.peak_allocated_bytes, step.peak_reserved_bytes, step.host_bytes)
    )


def run_figure(report: RunReport, *, max_points: int = 4000) -> Figure:
    """Draw the peaks of each step above the process's memory on the host.

    Of several ranks, the one with the highest peak is drawn. What was not measured leaves out its
    line, and a panel without any line.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    rank = report.highest_rank.rank
    steps = report.steps[rank]
    has_device = any(
        step.peak_allocated_bytes is not None or step.peak_reserved_bytes is not None
        for step in steps
    )
    has_host = any(step.host_bytes is not None for step in steps)
    figure = new_figure(10.0, 5.4 if has_device and has_host else 3.7)
    whose = "" if len(report.ranks) == 1 else f", rank {rank}, the highest of {len(report.ranks)}"
    count = max(1, has_device + has_host)
    heights = [2.0, 1.0][:count]
    panels: list[Axes] = figure.subplots(
        count, 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0].tolist()
    if has_device:
        _draw_device(panels[0], report, steps, max_points)
        panels[0].set_title(f"Peak of each step{whose}", **_TITLE)
    if has_host:
        _draw_host(panels[-1], steps, max_points)
    for axes in panels:
        _draw_events(axes, report, rank, with_labels=axes is panels[0])
        axes.set_xlim(*_step_range(report, rank))
    count_along(panels[-1], "step")
    _legend(figure, panels)
    return figure


_TITLE: dict[str, Any] = {"loc": "left", "color": INK, "fontsize": 10, "pad": 8}


def _step_range(report: RunReport, rank: int) -> tuple[float, float]:
    """Return the ends of the axis: all steps and events, with room for a marker on both sides."""
    numbers = [step.step for step in report.steps[rank]]
    for told in (report.out_of_memory, report.climbs, report.leaks):
        numbers += [entry.event.step for entry in told]
    low, high = min(numbers, default=0), max(numbers, default=1)
    margin = max(0.5, 0.015 * (high - low))
    return low - margin, high + margin


def _points(
    steps: Sequence[StepRecord], value: Callable[[StepRecord], int | None], max_points: int
) -> Points:
    """Take the known values of a series, thinned so that lows and highs stay."""
    known = [(step.step, found) for step in steps if (found := value(step)) is not None]
    kept = kept_events([found for _, found in known], max_points)
    return [float(known[i][0]) for i in kept], [float(known[i][1]) for i in kept]


def _draw_device(
    axes: Axes, report: RunReport, steps: Sequence[StepRecord], max_points: int
) -> None:
    allocated = _points(steps, lambda step: step.peak_allocated_bytes, max_points)
    reserved = _points(steps, lambda step: step.peak_reserved_bytes, max_points)
    predicted = _changes(steps)
    top = max([1.0, *allocated[1], *reserved[1], *(v for v in predicted[1] if v == v)])
    budget = report.budget_bytes
    shown_budget = budget if budget and budget <= BUDGET_IN_VIEW * top else None
    top = max(top, shown_budget or 0)
    style_axes(axes)
    unit_bytes = scale_bytes(axes, "peak", top, _HEADROOM)
    if predicted[0]:
        # A broad band stays visible under a measured line that lies on it.
        band = {"linewidth": 5.0, "alpha": 0.5, "solid_capstyle": "butt", "marker": ""}
        label = "predicted peak allocated"
        _line(axes, predicted, unit_bytes, color=PURPLE, label=label, drawstyle=_STEPS, **band)
    if reserved[0]:
        _line(axes, reserved, unit_bytes, color=CYAN, label="peak reserved", linestyle=_DOTTED)
    if allocated[0]:
        _line(axes, allocated, unit_bytes, color=BLUE, label="peak allocated")
    if budget:
        label = budget_label(budget, shown_budget)
        axes.axhline((shown_budget or math.nan) / unit_bytes, label=label, **BUDGET_LINE)


def _changes(steps: Sequence[StepRecord]) -> Points:
    """Take the predicted peak wherever it changes, with gaps where there is none."""
    numbers: list[float] = []
    values: list[float] = []
    before: int | None = None
    for step in steps:
        predicted = step.predicted_peak_bytes
        if predicted != before:
            numbers.append(float(step.step))
            values.append(math.nan if predicted is None else float(predicted))
        before = predicted
    if before is not None and steps:
        numbers.append(float(steps[-1].step))
        values.append(float(before))
    return numbers, values


def _draw_host(axes: Axes, steps: Sequence[StepRecord], max_points: int) -> None:
    host = _points(steps, lambda step: step.host_bytes, max_points)
    top = max(1.0, *host[1])
    style_axes(axes)
    unit_bytes = scale_bytes(axes, "host", top, _HEADROOM)
    axes.set_title("Resident memory of the process", **_TITLE)
    _line(axes, host, unit_bytes, color=YELLOW, label="host")


def _line(axes: Axes, points: Points, unit_bytes: int, **style: Any) -> None:
    few = len(points[0]) <= _MARKED_POINTS
    axes.plot(
        points[0],
        [value / unit_bytes for value in points[1]],
        **{"linewidth": 1.6, "marker": "o" if few else "", "markersize": 3.5, **style},
    )


def _draw_events(axes: Axes, report: RunReport, rank: int, *, with_labels: bool) -> None:
    """Mark what happened: a thin line through every panel, and a shape at its top."""
    kinds: list[tuple[str, list[int], str, str]] = [
        ("out of memory", [t.event.step for t in report.out_of_memory], "X", RED),
        ("larger plan again", [t.event.step for t in report.climbs], "^", GREEN),
        ("leak found", [t.event.step for t in report.leaks if t.rank == rank], "D", PURPLE),
    ]
    for label, numbers, marker, colour in kinds:
        found = marked_steps(numbers)
        for number in found if len(found) <= _MARKED_POINTS else ():
            axes.axvline(number, color=colour, linewidth=0.8, alpha=0.55, zorder=1)
        if found and with_labels:
            axes.plot(
                found,
                [_MARKER_HEIGHT] * len(found),
                transform=axes.get_xaxis_transform(),
                linestyle="none",
                marker=marker,
                markersize=7,
                color=colour,
                markeredgecolor=INK,
                markeredgewidth=0.5,
                label=f"{label} ({len(numbers):,})",
                zorder=6,
            )


def marked_steps(steps: Iterable[int]) -> list[int]:
    """Sort the steps of events, each once; of very many the first, the last and some between."""
    found = sorted(set(steps))
    if len(found) <= _MOST_MARKS:
        return found
    last = len(found) - 1
    return [found[round(mark * last / (_MOST_MARKS - 1))] for mark in range(_MOST_MARKS)]


def _legend(figure: Figure, panels: Sequence[Axes]) -> None:
    handles = [handle for axes in panels for handle in axes.get_legend_handles_labels()[0]]
    if handles:
        draw_legend(figure, handles, handle_length=2.2)


def plan_figure(training: Training, *, max_points: int = 4000) -> Figure | None:
    """Draw the plain step against the planned one; None where they are the same.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    if not training.planned.strategies:
        return None
    return timeline_figure(
        training.plain.timeline,
        training.planned.timeline,
        budget_bytes=allocated_budget(training),
        title="What the plan changes, predicted",
        names=("plain", "planned"),
        shares_axis=False,
        max_points=max_points,
    )


def allocated_budget(training: Training) -> int | None:
    """Return the budget where it bounds what a timeline shows."""
    return training.budget_bytes if training.planned.budget_of == "allocated" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """One step, as it was predicted and as it was measured."""

    title: str
    predicted: Timeline | None
    measured: Timeline | None
    budget_bytes: int | None


def step_of_run(report: RunReport) -> ShownStep | None:
    """Return the step that is shown of a run; None where no timeline was kept.

    A step of the run itself comes before the one that was measured apart from training.
    """
    if report.timeline is not None:
        return ShownStep(
            title=f"Step {report.timeline.step:,} by category",
            predicted=report.timeline.predicted,
            measured=report.timeline.measured,
            budget_bytes=report.budget_bytes,
        )
    training = report.training
    if training is None or training.measured is None:
        return None
    return ShownStep(
        title="The planned step, predicted and measured",
        predicted=training.planned.timeline,
        measured=training.measured.timeline,
        budget_bytes=allocated_budget(training),
    )


def step_figure(report: RunReport, *, max_points: int = 4000) -> Figure | None:
    """Draw the timeline of one step by category; None where there is none.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    step = step_of_run(report)
    if step is None:
        return None
    return timeline_figure(
        step.predicted,
        step.measured,
        budget_bytes=step.budget_bytes,
        title=step.title,
        max_points=max_points,
    )


def peaks_of_ranks(report: RunReport) -> list[tuple[str, str, list[int | None]]]:
    """Return the name, the colour and the values of what is known of several ranks."""
    kinds = [
        ("peak allocated", BLUE, [rank.peak_allocated_bytes for rank in report.ranks]),
        ("peak reserved", CYAN, [rank.peak_reserved_bytes for rank in report.ranks]),
        ("host", YELLOW, [rank.host_peak_bytes for rank in report.ranks]),
    ]
    return [kind for kind in kinds if any(kind[2])] if len(report.ranks) > 1 else []


def ranks_figure(report: RunReport) -> Figure | None:
    """Draw the peaks of the ranks as bars; None for a single rank, or where nothing is known.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    known = peaks_of_ranks(report)
    if not known:
        return None
    figure = new_figure(10.0, 3.2)
    panels = [[kind for kind in known if kind[0] != "host"], [k for k in known if k[0] == "host"]]
    panels = [panel for panel in panels if panel]
    for axes, kinds_here in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        _draw_bars(axes, report.ranks, kinds_here)
    _legend(figure, figure.axes)
    return figure


def _draw_bars(
    axes: Axes,
    ranks: Sequence[RankSummary],
    kinds: Sequence[tuple[str, str, Sequence[int | None]]],
) -> None:
    top = max(value or 0 for _, _, values in kinds for value in values)
    style_axes(axes)
    unit_bytes = scale_bytes(axes, "highest", top, 1.08)
    axes.set_xlabel("rank", color=MUTED, fontsize=9)
    for place, (label, colour, values) in enumerate(kinds):
        shift = (place - (len(kinds) - 1) / 2) * _BAR_WIDTH
        axes.bar(
            [index + shift for index in range(len(ranks))],
            [(value or 0) / unit_bytes for value in values],
            width=_BAR_WIDTH,
            color=colour,
            edgecolor=LINE,
            linewidth=0.5,
            label=label,
        )
    axes.set_xlim(-0.8, len(ranks) - 0.2)
    every = max(1, len(ranks) // 16)
    shown = list(range(0, len(ranks), every))
    axes.set_xticks(shown, [str(ranks[index].rank) for index in shown])


def metrics_figure(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the loss and the first validation metric over epochs or steps, one panel each.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    names = plotted_metrics(metrics)
    figure = new_figure(10.0, 2.7)
    if not names:
        return say_empty(figure, "No metrics were recorded.")
    unit = "step" if "step" in metrics[0] else "epoch"
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    for axes, name, colour in zip(panels, names, (RED, BLUE), strict=False):
        points = [
            (row.get(unit, number), row[name])
            for number, row in enumerate(metrics, start=1)
            if _is_finite(row.get(name))
        ]
        points = [points[i] for i in kept_events([value for _, value in points], _MOST_POINTS)]
        style_axes(axes)
        epochs, values = [point[0] for point in points], [point[1] for point in points]
        marker = "o" if len(points) <= 30 else ""
        axes.plot(epochs, values, color=colour, linewidth=1.8, marker=marker, markersize=3.5)
        axes.set_title(name.replace("_", " "), loc="left", color=INK, fontsize=10, pad=8)
        count_along(axes, unit)
        axes.margins(x=0.03, y=0.12)
    return figure


def plotted_metrics(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Choose what to draw of the epochs: the loss, and the validation MRR or what stands for it."""
    found = [name for row in metrics for name, value in row.items() if _is_finite(value)]
    valid = [name for name in found if name.startswith("valid_") and not name.endswith("_bytes")]
    preferred = "valid_mrr" if "valid_mrr" in valid else next(iter(valid), None)
    return [name for name in ("loss", preferred) if name is not None and name in found]


def _is_finite(value: object) -> bool:
    """Return whether a metric is a number that can be drawn."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
