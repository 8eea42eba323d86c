"""Pictures of a step and of a training run.

Figures are built as objects, without pyplot and its global state, so that a report can be made
inside a training process. Neutral colours become CSS variables in SVG, so that one picture serves
a light and a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memfit.errors import MissingExtraError
from memfit.figures import Timeline
from memfit.journal.one_axis import laid_along
from memfit.trace.events import Category
from memfit.units import GIB, KIB, MIB, format_bytes

from .timeline_points import (
    PhaseSpan,
    downsample,
    highest_events,
    labelled_spans,
    phase_spans,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# "Bright" qualitative scheme, distinct under colour-vision deficiency; lines differ in their
# dashes and markers in their shapes as well.
# Source: Paul Tol, Colour Schemes, SRON/EPS/TN/09-002, issue 3.2, 2021-08-18.
BLUE, CYAN, GREEN, YELLOW = "#4477aa", "#66ccee", "#228833", "#ccbb44"
RED, PURPLE, GREY = "#ee6677", "#aa3377", "#bbbbbb"
CATEGORY_COLOURS = {
    Category.PARAMETERS.value: BLUE,
    Category.BUFFERS.value: GREY,
    Category.OPTIMIZER_STATE.value: CYAN,
    Category.GRADIENTS.value: GREEN,
    Category.BATCH.value: PURPLE,
    Category.SAVED_ACTIVATIONS.value: RED,
    Category.TEMPORARIES.value: YELLOW,
}
OTHER_COLOUR = "#8c959f"

INK, MUTED, LINE, SURFACE = "#1f2429", "#5f6872", "#dfe3e8", "#fefefe"
_SHADE = {"setup": "#f1f2f4", "forward": "#fefefe", "backward": "#f3f5f8", "optimizer": "#e9edf2"}
_CSS_VARIABLES = {
    INK: "--plot-ink",
    MUTED: "--plot-muted",
    LINE: "--plot-line",
    SURFACE: "--plot-surface",
    _SHADE["setup"]: "--plot-setup",
    _SHADE["backward"]: "--plot-backward",
    _SHADE["optimizer"]: "--plot-optimizer",
}
# Above this many points a step drawn as a slope looks the same and halves the file.
_MAX_STEP_POINTS = 300
BUDGET_LINE: dict[str, Any] = {"color": INK, "linewidth": 1.1, "linestyle": (0, (5, 3))}
BUDGET_IN_VIEW = 1.6
"""A budget further above the peak would flatten a picture; the legend names it then."""
_HEADROOM = 1.24
# The width of a letter of a phase's name, as a part of a panel of half the figure.
_PERCENT_PER_LETTER = 1.75
_OTHER_POINTS = 160


def new_figure(width_inches: float, height_inches: float, *, extra: str = "html") -> Figure:
    """Make an empty figure without pyplot; ``extra`` is the one that matplotlib belongs to.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise MissingExtraError("A picture of memory", "matplotlib", extra) from error
    return Figure(
        figsize=(width_inches, height_inches),
        layout=ConstrainedLayoutEngine(wspace=0.05),
        facecolor=SURFACE,
        dpi=160,
    )


def timeline_figure(
    predicted: Timeline | None,
    measured: Timeline | None,
    *,
    budget_bytes: int | None = None,
    title: str = "",
    names: tuple[str, str] = ("predicted", "measured"),
    shares_axis: bool = True,
    max_points: int = 4000,
) -> Figure:
    """Draw allocated bytes over one step, stacked by category, two timelines side by side.

    Each panel also shows the total of the other one. Both have one horizontal axis, which counts
    the allocations and frees of the step; it is not time.

    Args:
        predicted: the left panel; None leaves it out.
        measured: the right panel; None leaves it out.
        budget_bytes: drawn as a dashed line where it is near enough to be seen.
        title: the heading of the figure.
        names: what the two panels are called.
        shares_axis: both are of the same step, so that what is equal lies on each other.
        max_points: longer timelines are thinned to this, keeping their maxima.

    Raises:
        MissingExtraError: if matplotlib is not installed.
    """
    if predicted is not None and measured is not None and shares_axis:
        measured = laid_along(measured, predicted)
    pairs = [
        (name, downsample(timeline, max_points))
        for name, timeline in zip(names, (predicted, measured), strict=True)
        if timeline is not None and timeline.allocated_bytes
    ]
    figure = new_figure(10.0, 4.6)
    if title:
        figure.suptitle(title, x=0.004, ha="left", fontsize=11.5, fontweight="bold", color=INK)
    if not pairs:
        return say_empty(figure, "No timeline was recorded.")
    top = max(max(timeline.allocated_bytes) for _, timeline in pairs) or 1
    shown_budget = budget_bytes if budget_bytes and budget_bytes <= BUDGET_IN_VIEW * top else None
    axes = figure.subplots(1, len(pairs), sharex=True, sharey=True, squeeze=False)[0]
    unit_bytes = scale_bytes(axes[0], "allocated", max(top, shown_budget or 0), _HEADROOM)
    axes[0].set_xlim(0, max(1, *(timeline.axis()[-1] for _, timeline in pairs)))
    for index, (name, timeline) in enumerate(pairs):
        style_axes(axes[index])
        _draw_panel(axes[index], timeline, name=name, unit_bytes=unit_bytes)
        _mark_peak(axes[index], timeline, unit_bytes=unit_bytes, budget_bytes=shown_budget)
        if len(pairs) == 2:
            other_name, other = pairs[1 - index]
            _draw_other(axes[index], other, name=other_name, unit_bytes=unit_bytes)
        if shown_budget:
            axes[index].axhline(shown_budget / unit_bytes, **BUDGET_LINE)
    _draw_legend(figure, [timeline for _, timeline in pairs], budget_bytes, shown_budget)
    return figure


def say_empty(figure: Figure, sentence: str) -> Figure:
    """Say that there is nothing to draw instead of drawing an empty panel."""
    figure.text(0.5, 0.5, sentence, ha="center", color=MUTED, fontsize=11)
    return figure


def axis_unit(num_bytes: int) -> tuple[int, str]:
    """Choose the unit of a bytes axis."""
    for unit_bytes, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit_bytes:
            return unit_bytes, unit
    return 1, "bytes"


def style_axes(axes: Axes) -> None:
    """Keep a light grid behind the data and no frame."""
    axes.set_facecolor(SURFACE)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(LINE)
    axes.tick_params(colors=MUTED, labelsize=8.5, length=0, pad=5)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)


def count_along(axes: Axes, name: str) -> None:
    """Have the horizontal axis count something: whole numbers alone, in groups of three digits."""
    axes.set_xlabel(name, color=MUTED, fontsize=9)
    locator: Any = axes.xaxis.get_major_locator()
    locator.set_params(integer=True, min_n_ticks=1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def scale_bytes(axes: Axes, name: str, top: float, headroom: float) -> int:
    """Have the vertical axis show bytes from zero, and return the bytes of its unit."""
    unit_bytes, unit = axis_unit(int(top))
    axes.set_ylim(0, headroom * top / unit_bytes)
    axes.set_ylabel(f"{name} ({unit})", color=MUTED, fontsize=9)
    return unit_bytes


def ordered_categories(timeline: Timeline) -> list[str]:
    """List the categories that hold anything: the lasting ones below, unknown ones on top."""
    known = [name for name in CATEGORY_COLOURS if name in timeline.by_category]
    names = known + sorted(set(timeline.by_category) - set(known))
    return [name for name in names if any(timeline.by_category[name])]


def _draw_panel(axes: Axes, timeline: Timeline, *, name: str, unit_bytes: int) -> None:
    """Draw one stacked timeline with its phases."""
    places = timeline.axis()
    names = ordered_categories(timeline)
    if names:
        step = "post" if len(places) <= _MAX_STEP_POINTS else None
        axes.stackplot(
            places,
            [[value / unit_bytes for value in timeline.by_category[key]] for key in names],
            colors=[CATEGORY_COLOURS.get(key, OTHER_COLOUR) for key in names],
            linewidth=0,
            zorder=2,
            step=step,
        )
    _draw_phases(axes, phase_spans(timeline))
    count_along(axes, "allocations and frees")
    axes.set_title(name, loc="left", color=INK, fontsize=10, pad=8)


def _draw_phases(axes: Axes, spans: Sequence[PhaseSpan]) -> None:
    """Shade the phases and write their names where there is room."""
    for span in spans:
        shade = _SHADE.get(span.name, _SHADE["setup"])
        axes.axvspan(span.start, span.end, color=shade, linewidth=0, zorder=0)
    per_letter = _PERCENT_PER_LETTER / 100 * axes.get_xlim()[1]
    for span in labelled_spans(spans, per_letter):
        if span.start > 0:
            axes.axvline(span.start, color=MUTED, linewidth=0.6, alpha=0.6, zorder=3)
        axes.text(
            (span.start + span.end) / 2,
            0.985,
            span.name,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=8,
            color=MUTED,
        )


def _mark_peak(
    axes: Axes, timeline: Timeline, *, unit_bytes: int, budget_bytes: int | None
) -> None:
    """Put a dot and the bytes at the highest point, clear of the budget's line."""
    peak_bytes = max(timeline.allocated_bytes)
    place = timeline.axis()[list(timeline.allocated_bytes).index(peak_bytes)]
    height, width = axes.get_ylim()[1], axes.get_xlim()[1]
    peak, budget = peak_bytes / unit_bytes, (budget_bytes or 0) / unit_bytes
    label_at = peak + 0.03 * height
    is_in_the_way = budget_bytes is not None and peak <= budget <= label_at + 0.07 * height
    if is_in_the_way:
        label_at = budget + 0.02 * height
        axes.plot([place, place], [peak, label_at], color=INK, linewidth=0.7, zorder=5)
    axes.plot(
        [place],
        [peak],
        marker="o",
        markersize=4.5,
        color=INK,
        markeredgecolor=SURFACE,
        zorder=6,
        clip_on=False,
    )
    axes.text(
        place,
        label_at,
        f"peak {format_bytes(peak_bytes)}",
        ha="left" if place < 0.22 * width else "right" if place > 0.78 * width else "center",
        va="bottom",
        fontsize=9,
        fontweight="bold",
        color=INK,
        zorder=7,
        bbox={"facecolor": SURFACE, "edgecolor": "none", "pad": 1.5, "alpha": 0.85},
    )


def _draw_other(axes: Axes, other: Timeline, *, name: str, unit_bytes: int) -> None:
    """Draw the total of the other timeline as a line; a long one by its upper edge."""
    events = highest_events(other.allocated_bytes, _OTHER_POINTS)
    places = other.axis()
    axes.plot(
        [places[event] for event in events],
        [other.allocated_bytes[event] / unit_bytes for event in events],
        color=INK,
        linewidth=1.2,
        zorder=4,
        drawstyle="steps-post" if len(events) == len(places) else "default",
    )
    axes.set_title(f"line: total {name}", loc="right", color=MUTED, fontsize=8.5, pad=8)


def _draw_legend(
    figure: Figure,
    timelines: Sequence[Timeline],
    budget_bytes: int | None,
    shown_budget: int | None,
) -> None:
    """Name the categories that occur, and the budget, below the panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found = {name for timeline in timelines for name in ordered_categories(timeline)}
    ordered = [*CATEGORY_COLOURS, *sorted(found - set(CATEGORY_COLOURS))]
    handles: list[Any] = [
        Patch(color=CATEGORY_COLOURS.get(name, OTHER_COLOUR), label=name, linewidth=0)
        for name in ordered
        if name in found
    ]
    if budget_bytes:
        style = BUDGET_LINE if shown_budget else {**BUDGET_LINE, "linestyle": "none"}
        handles.append(Line2D([], [], label=budget_label(budget_bytes, shown_budget), **style))
    draw_legend(figure, handles, handle_length=1.4)


def budget_label(budget_bytes: int, shown_budget: int | None) -> str:
    """Name a budget, and say where it is if it is not shown."""
    note = "" if shown_budget else " (above the picture)"
    return f"budget {format_bytes(budget_bytes)}{note}"


def draw_legend(figure: Figure, handles: Sequence[Any], *, handle_length: float) -> None:
    """Name what is drawn, below the panels."""
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(4, len(handles)) or 1,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        handlelength=handle_length,
        columnspacing=2.0,
    )


def png_bytes(figure: Figure) -> bytes:
    """Return a figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def svg_text(figure: Figure, *, prefix: str = "plot") -> str:
    """Return a figure as an ``<svg>`` element for a page.

    Text stays text, ids begin with ``prefix`` so that several pictures fit on one page, and
    neutral colours are CSS variables with the light colour as their default.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    no_dates = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", metadata=no_dates)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = text.replace("url(#", f"url(#{prefix}-")
    text = re.sub(r' d="[^"]*"', lambda path: _round_path(path.group()), text)
    for colour, variable in _CSS_VARIABLES.items():
        text = text.replace(colour, f"var({variable}, {colour})")
    return text


def _round_path(path: str) -> str:
    """Round the coordinates of a path to hundredths of a point, which no screen resolves."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", path)
