"""A picture of what memory costs in time: every trade that the planner knows around a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from memfit.figures import ConsideredPlan, ParetoPoint
from memfit.planner.result.planning_result import PlanningResult
from memfit.units import format_bytes, format_seconds

from .plan_rows import curve, plain_row, predicted
from .plots import (
    BLUE,
    BUDGET_IN_VIEW,
    BUDGET_LINE,
    INK,
    LINE,
    MUTED,
    RED,
    SURFACE,
    axis_unit,
    new_figure,
    style_axes,
)
from .wording import FIGURE_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Entry = ParetoPoint | ConsideredPlan
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """The units of the axes."""

    unit_bytes: int
    byte_unit: str
    unit_seconds: float
    time_unit: str

    def place(self, entry: _Entry) -> tuple[float, float]:
        """Return where a plan lies in the picture."""
        return entry.peak_bytes / self.unit_bytes, entry.step_seconds / self.unit_seconds


def check_can_draw() -> None:
    """Find out before a long search whether a picture can be drawn.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    new_figure(1.0, 1.0, extra="plots")


def pareto_figure(plan: PlanningResult) -> Figure:
    """Draw peaks against step times: recorded trades filled, estimated ones hollow.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    prediction = predicted(plan)
    points, plain = curve(plan), plain_row(plan.considered)
    entries: list[_Entry] = [*points, *([plain] if plain else [])]
    unit_bytes, byte_unit = axis_unit(max(entry.peak_bytes for entry in entries))
    longest_seconds = max(entry.step_seconds for entry in entries)
    unit_seconds, time_unit = next(
        (unit for unit in _TIME_UNITS if longest_seconds >= unit[0]), _TIME_UNITS[-1]
    )
    scale = _Scale(
        unit_bytes=unit_bytes, byte_unit=byte_unit, unit_seconds=unit_seconds, time_unit=time_unit
    )
    figure = new_figure(8.0, 5.0, extra="plots")
    axes = figure.subplots()
    style_axes(axes)
    axes.grid(axis="x", color=LINE, linewidth=0.8)
    _draw_curve(axes, points, scale, fits=prediction.fits is not False)
    if plain is not None and plain.strategies not in {point.strategies for point in points}:
        _draw_marker(axes, scale.place(plain), f"plain step: {_figures(plain)}", marker="s")
    _draw_budget(axes, prediction.budget_bytes, entries, scale)
    peak = FIGURE_NAMES[prediction.budget_of]
    axes.set_xlabel(f"{peak} ({scale.byte_unit})", color=MUTED, fontsize=9)
    axes.set_ylabel(f"predicted step time ({scale.time_unit})", color=MUTED, fontsize=9)
    title = f"Memory against time on {plan.device}"
    axes.set_title(title, loc="left", color=INK, fontsize=11.5, pad=10)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    return figure


def _draw_curve(axes: Axes, points: Sequence[ParetoPoint], scale: _Scale, *, fits: bool) -> None:
    """Draw the trades, with the fastest that was recorded for each budget as a line behind them."""
    ordered = sorted(scale.place(point) for point in points if point.is_recorded)
    peaks, times = [place[0] for place in ordered], accumulate((p[1] for p in ordered), min)
    axes.step(peaks, list(times), where="post", color=BLUE, linewidth=1.0, alpha=0.45, zorder=2)
    for is_recorded, label in ((True, "recorded"), (False, "estimated")):
        places = [
            scale.place(point)
            for point in points
            if point.is_recorded is is_recorded and not point.is_chosen
        ]
        if places:
            axes.scatter(
                [place[0] for place in places],
                [place[1] for place in places],
                s=26,
                facecolors=BLUE if is_recorded else SURFACE,
                edgecolors=BLUE,
                linewidths=1.1,
                label=label,
                zorder=4 if is_recorded else 3,
            )
    for point in points:
        if point.is_chosen:
            label = f"{'chosen' if fits else 'smallest'}: {_figures(point)}"
            _draw_marker(axes, scale.place(point), label, colour=RED, diameter=9)


def _draw_marker(
    axes: Axes,
    place: tuple[float, float],
    label: str,
    *,
    marker: str = "o",
    colour: str = MUTED,
    diameter: float = 6,
) -> None:
    axes.plot(
        [place[0]],
        [place[1]],
        marker=marker,
        markersize=diameter,
        color=colour,
        markeredgecolor=SURFACE,
        linestyle="none",
        label=label,
        zorder=5,
    )


def _draw_budget(
    axes: Axes,
    budget_bytes: int | None,
    entries: Sequence[_Entry],
    scale: _Scale,
) -> None:
    """Draw the budget where it is near enough to be seen; otherwise name it in the legend."""
    if not budget_bytes:
        return
    label = f"budget: {format_bytes(budget_bytes)}"
    if budget_bytes <= BUDGET_IN_VIEW * max(entry.peak_bytes for entry in entries):
        axes.axvline(budget_bytes / scale.unit_bytes, label=label, zorder=1, **BUDGET_LINE)
    else:
        axes.plot([], [], label=f"{label} (outside the picture)", linestyle="none")


def _figures(entry: _Entry) -> str:
    return f"{format_bytes(entry.peak_bytes)}, {format_seconds(entry.step_seconds)}"
