"""The page of one run: a single file that asks nothing of the network.

The page gets plain rows and formatted text; its template decides only how they look.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.errors import MissingExtraError
from memfit.figures import Certainty, Prediction
from memfit.units import format_bytes, format_seconds

from .contents import RunReport
from .plan_rows import considered_rows
from .plots import (
    CATEGORY_COLOURS,
    OTHER_COLOUR,
    metrics_figure,
    plotted_metrics,
    svg_text,
    timeline_figure,
)
from .wording import (
    FIGURE_NAMES,
    bounded_certainty,
    explanation_lines,
    fits_sentence,
    flat_values,
    format_value,
    is_within,
    module_name,
    percent,
    plan_name,
    signed_error,
)

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

# An inline picture needs no more points than a wide screen has columns for a panel.
_INLINE_POINTS = 900
_TOP_MODULES = 12
TONES = {True: "good", False: "bad", None: ""}
"""The class of what fits, of what does not, and where there is no budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One headline number with the lines below it."""

    label: str
    value: str
    notes: tuple[str, ...]
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _GaugeBar:
    """One peak as a bar against the budget."""

    label: str
    value: str
    width: float
    """Percent of the gauge."""
    tone: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One category or module, plain and planned."""

    name: str
    colour: str
    plain: str
    planned: str
    change: str
    share: str
    plain_width: float
    planned_width: float
    """Percent of the widest bar in the table."""


def page_environment() -> Environment:
    """Make the template environment.

    Raises:
        MissingExtraError: if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("The HTML report", "jinja2", "html") from error
    environment = Environment(
        loader=PackageLoader("memfit.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=format_bytes, seconds=format_seconds, plan=plan_name, module=module_name
    )
    return environment


def report_html(report: RunReport) -> str:
    """Render a run as one self-contained page.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.
    """
    template = page_environment().get_template("report.html.j2")
    pictures = [
        svg_text(figure, prefix=f"timeline{number}")
        for number, figure in enumerate(timeline_pictures(report, max_points=_INLINE_POINTS))
    ]
    metrics_picture = ""
    if plotted_metrics(report.metrics):
        metrics_picture = svg_text(metrics_figure(report.metrics), prefix="metrics")
    fits, verdict = _verdict(report)
    return template.render(
        report=report,
        considered=considered_rows(report.rows),
        verdict=verdict,
        tone=TONES[fits],
        cards=_cards(report),
        gauge=_gauge(report),
        budget_width=_budget_width(report),
        explanation=explanation_lines(
            report.plain, report.planned, budget_bytes=report.budget_bytes, rows=report.rows
        ),
        pictures=pictures,
        categories=_parts(report, report.plain.by_category, report.planned.by_category),
        modules=_modules(report),
        measured_error=_measured_error(report),
        metrics_picture=metrics_picture,
        shown=[(title, _data_address(content)) for title, content in report.pictures],
        metric_names=_metric_names(report),
        metric_rows=_metric_rows(report),
        results=flat_values(report.results),
    )


def _data_address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def timeline_pictures(report: RunReport, *, max_points: int = 4000) -> list[Figure]:
    """Draw the plain step against the planned one, then the planned step against the measured one.

    What was not recorded is left out; the last picture is the one for the run folder.
    """
    plain, planned = report.plain.timeline, report.planned.timeline
    measured = report.measured.timeline if report.measured else None
    pictures = []
    if plain is not None and planned is not None and report.planned.strategies:
        pictures.append(
            timeline_figure(
                plain,
                planned,
                budget_bytes=_allocated_budget(report),
                title="What the plan changes, predicted",
                names=("plain", "planned"),
                max_points=max_points,
            )
        )
    if measured is not None or not pictures:
        pictures.append(
            timeline_figure(
                planned,
                measured,
                budget_bytes=_allocated_budget(report),
                title="The planned step, predicted and measured",
                max_points=max_points,
            )
        )
    return pictures


def _allocated_budget(report: RunReport) -> int | None:
    """Return the budget where it bounds what the timeline shows."""
    return report.budget_bytes if report.planned.budget_of == "allocated" else None


def _verdict(report: RunReport) -> tuple[bool | None, str]:
    """Return whether the run fits; what was measured overrules what was predicted."""
    found = report.found_bytes
    if found and report.budget_bytes is not None and found > report.budget_bytes:
        figure = FIGURE_NAMES[report.planned.budget_of]
        return False, (
            f"The run went above the budget of {format_bytes(report.budget_bytes)}: measured "
            f"{figure} {format_bytes(found)}, "
            f"{format_bytes(found - report.budget_bytes)} too much; predicted "
            f"{format_bytes(report.planned.bounded_bytes())}."
        )
    within = is_within(report.planned, report.budget_bytes)
    return within, fits_sentence(report.planned, report.budget_bytes)


def _cards(report: RunReport) -> list[Card]:
    """Choose the headline numbers."""
    budget_of = report.planned.budget_of
    figure = FIGURE_NAMES[budget_of]
    cards = [
        _prediction_card("Plain peak", report.plain, report.budget_bytes),
        _prediction_card("Planned peak", report.planned, report.budget_bytes),
    ]
    measurement = report.measured
    if measurement is None:
        cards.append(Card(label="Measured peak", value="-", notes=("not measured",)))
    else:
        found = report.found_bytes
        over = found is not None and report.budget_bytes and found > report.budget_bytes
        notes = (figure, f"step {format_seconds(measurement.step_seconds)}")
        value = "-" if found is None else format_bytes(found)
        cards.append(
            Card(label="Measured peak", value=value, notes=notes, tone="bad" if over else "")
        )
    budget = "none" if report.budget_bytes is None else format_bytes(report.budget_bytes)
    cards.append(Card(label="Budget", value=budget, notes=("bounds", figure)))
    cards.append(
        Card(label="Error", value=_measured_error(report), notes=("predicted against", "measured"))
    )
    return cards


def _prediction_card(label: str, prediction: Prediction, budget_bytes: int | None) -> Card:
    """Show the bounded figure of a prediction, and say so where it is a guess."""
    guess = " (guess)" if bounded_certainty(prediction) is Certainty.GUESS else ""
    return Card(
        label=label,
        value=format_bytes(prediction.bounded_bytes()),
        notes=(
            f"{FIGURE_NAMES[prediction.budget_of]}{guess}",
            f"step {format_seconds(prediction.step_seconds)}",
        ),
        tone=TONES[is_within(prediction, budget_bytes)],
    )


def _measured_error(report: RunReport) -> str:
    """Write the signed error of the figure that the budget bounds."""
    if report.found_bytes is None:
        return "-"
    return signed_error(report.planned.bounded_bytes(), report.found_bytes)


def _peaks(report: RunReport) -> list[tuple[str, int]]:
    """List the peaks that the gauge compares."""
    peaks = [
        ("plain", report.plain.bounded_bytes()),
        ("planned", report.planned.bounded_bytes()),
    ]
    if report.found_bytes is not None:
        peaks.append(("measured", report.found_bytes))
    return peaks


def _gauge_bytes(report: RunReport) -> int:
    """Return the bytes at the right end of the gauge."""
    return max(1, *(peak for _, peak in _peaks(report)), report.budget_bytes or 0)


def _gauge(report: RunReport) -> list[_GaugeBar]:
    """Set the peaks against the budget as bars."""
    whole = _gauge_bytes(report)
    return [
        _GaugeBar(
            label=label,
            value=format_bytes(peak),
            width=round(100 * peak / whole, 2),
            tone="over" if report.budget_bytes and peak > report.budget_bytes else label,
        )
        for label, peak in _peaks(report)
    ]


def _budget_width(report: RunReport) -> float | None:
    """Return the place of the budget on the gauge, in percent."""
    if not report.budget_bytes:
        return None
    return round(100 * report.budget_bytes / _gauge_bytes(report), 2)


def _parts(report: RunReport, plain: Mapping[str, int], planned: Mapping[str, int]) -> list[_Part]:
    """Pair the parts of the plain peak with those of the planned one, largest first."""
    names = [name for name in {**plain, **planned} if plain.get(name) or planned.get(name)]
    names.sort(key=lambda name: (-max(plain.get(name, 0), planned.get(name, 0)), name))
    widest = max([1, *plain.values(), *planned.values()])
    parts = []
    for name in names:
        before, after = plain.get(name, 0), planned.get(name, 0)
        parts.append(
            _Part(
                name=module_name(name),
                colour=CATEGORY_COLOURS.get(name, OTHER_COLOUR),
                plain=format_bytes(before),
                planned=format_bytes(after),
                change=_change(before, after),
                share=percent(after, report.planned.peak_allocated_bytes),
                plain_width=round(100 * before / widest, 2),
                planned_width=round(100 * after / widest, 2),
            )
        )
    return parts


def _change(before_bytes: int, after_bytes: int) -> str:
    """Write how a part of the peak changes."""
    if before_bytes == after_bytes:
        return "same"
    return signed_error(after_bytes, before_bytes) if before_bytes else "new"


def _modules(report: RunReport) -> list[_Part]:
    """Pair the modules that hold most."""
    return _parts(report, report.plain.by_module, report.planned.by_module)[:_TOP_MODULES]


def _metric_names(report: RunReport) -> list[str]:
    """List the columns of the metrics in the order in which they first occur."""
    return list(dict.fromkeys(name for row in report.metrics for name in row))


def _metric_rows(report: RunReport) -> list[list[str]]:
    """Return the metrics as text, a dash where an epoch has no such value."""
    names = _metric_names(report)
    return [[format_value(name, row.get(name)) for name in names] for row in report.metrics]
