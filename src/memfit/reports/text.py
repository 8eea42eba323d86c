"""Reports for a terminal: rich renderables that fit 80 columns, with or without colour.

No renderable prints; the caller gives it to its own console. Names from outside are wrapped in
``Text``, since plain strings would be read as console markup.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement as CellMeasurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from memfit.figures import Certainty, ConsideredPlan, Holder, Measurement, Prediction, Term
from memfit.units import format_bytes, format_seconds

from .wording import (
    explanation_lines,
    fits_sentence,
    is_within,
    largest_first,
    module_name,
    percent,
    plan_name,
    process_certainty,
    shorten,
    signed_error,
)

WIDTH = 80
_BAR_WIDTH = 22
_NAME_WIDTH = 30
_PLAN_WIDTH = 28
_TOP = 10
_INDENT = (0, 0, 0, 2)


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar of a fraction from 0 to 1, in characters that the terminal can write."""

    fraction: float

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> CellMeasurement:
        """Ask for the whole width of a bar, so that names give way instead."""
        return CellMeasurement(_BAR_WIDTH, _BAR_WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the bar; anything above zero shows at least one mark."""
        length = round(self.fraction * _BAR_WIDTH) or (1 if self.fraction > 0 else 0)
        mark = "#" if options.ascii_only else "\N{FULL BLOCK}"
        yield Text(mark * length, style="cyan")


def _grid(*, header: bool = False) -> Table:
    """Make a table without lines, at most as wide as the page minus its indent."""
    return Table(
        box=None,
        show_header=header,
        header_style="dim",
        padding=(0, 2, 0, 0),
        pad_edge=False,
        collapse_padding=True,
    )


def _section(title: str, body: RenderableType) -> RenderableType:
    """Put a heading above an indented body, with an empty line before both."""
    return Group("", Text(title, style="bold"), Padding(body, _INDENT))


def _at_page_width(*parts: RenderableType) -> RenderableType:
    """Hold a report to the width of a page on wider terminals."""
    return Constrain(Group(*parts), width=WIDTH)


def _mark(certainty: Certainty) -> Text:
    """Write how a figure is known; a guess stands out."""
    return Text(certainty.value, style="bold yellow" if certainty is Certainty.GUESS else "dim")


def _time_mark(prediction: Prediction) -> Text:
    """Mark the step time, which is never exact."""
    if prediction.certainty is Certainty.GUESS:
        return _mark(Certainty.GUESS)
    return Text("estimate", style="dim")


def prediction_table(prediction: Prediction) -> RenderableType:
    """Show one prediction: headline, fit, categories, modules, largest blocks and terms."""
    parts: list[RenderableType] = [
        Text(f"Predicted step on {prediction.device}", style="bold"),
        Padding(_headline(prediction), _INDENT),
        Padding(_fits_text(prediction), _INDENT),
    ]
    peak_bytes = prediction.peak_allocated_bytes
    if prediction.by_category:
        table = _parts_table(largest_first(prediction.by_category), peak_bytes)
        parts.append(_section("At the peak, by category", table))
    if prediction.by_module:
        named = _named_modules(prediction.by_module)
        table = _parts_table(largest_first(named, limit=_TOP), peak_bytes)
        parts.append(_section("At the peak, by module", table))
    if prediction.largest:
        parts.append(_section("Largest allocations at the peak", _holders(prediction.largest)))
    if prediction.terms:
        parts.append(_section("Terms", _terms(prediction.terms)))
    return _at_page_width(*parts)


def _named_modules(by_module: Mapping[str, int]) -> dict[str, int]:
    """Give every module a name that can be shown."""
    return {module_name(module): num_bytes for module, num_bytes in by_module.items()}


def _headline(prediction: Prediction) -> Table:
    """Show the peaks and the step time, each with how it is known."""
    table = _grid()
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    certainty = prediction.certainty
    rows: list[tuple[str, Text, Text]] = [
        (
            "peak allocated",
            Text(format_bytes(prediction.peak_allocated_bytes), style="bold"),
            _mark(certainty),
        ),
        ("peak reserved", Text(format_bytes(prediction.peak_reserved_bytes)), _mark(certainty)),
        (
            "process",
            Text(format_bytes(prediction.process_bytes)),
            _mark(process_certainty(prediction)),
        ),
        (
            "first step peak",
            Text(format_bytes(prediction.first_step_peak_bytes)),
            _mark(certainty),
        ),
        ("step time", Text(format_seconds(prediction.step_seconds)), _time_mark(prediction)),
    ]
    for row in rows:
        table.add_row(*row)
    table.add_row("batch size", f"{prediction.batch_size:,}")
    plan = Table.grid(padding=(0, 2, 0, 0))
    plan.add_column(min_width=15)
    plan.add_column(overflow="fold")
    plan.add_row("plan", Text(plan_name(prediction.strategies)))
    plan.add_row("numerics", Text(prediction.numerics))
    whole = Table.grid()
    whole.add_row(table)
    whole.add_row(plan)
    return whole


def _fits_text(prediction: Prediction) -> Text:
    """Say whether the prediction fits its budget, in green or red."""
    within = is_within(prediction, prediction.budget_bytes)
    style = {True: "green", False: "bold red", None: ""}[within]
    return Text(fits_sentence(prediction, prediction.budget_bytes), style=style)


def _parts_table(parts: Sequence[tuple[str, int]], whole_bytes: int) -> Table:
    """Show parts of the peak with their share and a bar."""
    table = _grid()
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, num_bytes in parts:
        table.add_row(
            Text(shorten(name, _NAME_WIDTH)),
            format_bytes(num_bytes),
            percent(num_bytes, whole_bytes),
            _Bar(min(1.0, num_bytes / whole_bytes) if whole_bytes else 0.0),
        )
    return table


def _holders(holders: Sequence[Holder]) -> Table:
    """Show the largest blocks that live at the peak."""
    table = _grid(header=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("category", no_wrap=True)
    table.add_column("module", no_wrap=True)
    table.add_column("operator", no_wrap=True)
    for holder in sorted(holders, key=lambda holder: -holder.num_bytes)[:_TOP]:
        table.add_row(
            format_bytes(holder.num_bytes),
            Text(holder.category),
            Text(shorten(module_name(holder.module), 22)),
            Text(shorten(holder.operator, 20)),
        )
    return table


def _terms(terms: Sequence[Term]) -> Table:
    """Show the terms of a peak, each with how it is known and from where."""
    table = _grid(header=True)
    table.add_column("term", max_width=24)
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    table.add_column("source", overflow="fold")
    for term in terms:
        table.add_row(
            Text(term.name),
            format_bytes(term.num_bytes),
            _mark(term.certainty),
            Text(term.source, style="dim"),
        )
    return table


def comparison_table(predictions: Sequence[Prediction]) -> RenderableType:
    """Show predictions side by side: several devices, several plans, or both.

    What all of them share stands in the heading instead of a column.
    """
    devices = {prediction.device for prediction in predictions}
    plans = {plan_name(prediction.strategies) for prediction in predictions}
    heading = "Predicted steps"
    if len(devices) == 1:
        heading += f" on {next(iter(devices))}"
    if len(plans) == 1:
        heading += f" ({next(iter(plans))})"
    table = _grid(header=True)
    table.add_column("device" if len(plans) == 1 else "plan", overflow="fold")
    for column in ("allocated", "reserved", "process", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("known", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for prediction in predictions:
        name = Text(
            prediction.device
            if len(plans) == 1
            else plan_name(prediction.strategies, width=_PLAN_WIDTH)
        )
        if len(plans) > 1 and len(devices) > 1:
            name.append(f"\n{prediction.device}", style="dim")
        table.add_row(name, *_comparison_cells(prediction))
    return _at_page_width(Text(heading, style="bold"), Padding(table, _INDENT))


def _comparison_cells(prediction: Prediction) -> list[RenderableType]:
    """Give the figures of one prediction in the order of the comparison's columns."""
    return [
        format_bytes(prediction.peak_allocated_bytes),
        format_bytes(prediction.peak_reserved_bytes),
        format_bytes(prediction.process_bytes),
        format_seconds(prediction.step_seconds),
        _mark(_bounded_certainty(prediction)),
        _yes_or_no(is_within(prediction, prediction.budget_bytes)),
    ]


def _bounded_certainty(prediction: Prediction) -> Certainty:
    """Give how the figure that the budget bounds is known."""
    if prediction.budget_of == "process":
        return process_certainty(prediction)
    return prediction.certainty


def _yes_or_no(fits: bool | None) -> Text:
    """Write whether something fits; unknown is a dash."""
    if fits is None:
        return Text("-", style="dim")
    return Text("yes", style="green") if fits else Text("no", style="bold red")


def measurement_table(
    measurement: Measurement, prediction: Prediction | None = None
) -> RenderableType:
    """Show a measured step with the predicted figures beside it and the signed error.

    The error is predicted over measured minus one: above zero, too much was predicted. Without a
    prediction, only the peak that the measurement carries is compared.
    """
    table = _grid(header=True)
    table.add_column("")
    for column in ("measured", "predicted", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, measured, predicted in _measured_rows(measurement, prediction):
        table.add_row(
            Text(name), _bytes(measured), _bytes(predicted), signed_error(predicted, measured)
        )
    seconds = prediction.step_seconds if prediction else None
    table.add_row(
        "step time",
        format_seconds(measurement.step_seconds),
        "-" if seconds is None else format_seconds(seconds),
        signed_error(seconds, measurement.step_seconds),
    )
    plan = f"plan: {plan_name(measurement.strategies)} ({measurement.numerics})"
    heading = f"Measured step on {measurement.device}, batch size {measurement.batch_size:,}"
    parts: list[RenderableType] = [
        Text(heading, style="bold"),
        Padding(Text(plan), _INDENT),
        Padding(table, _INDENT),
    ]
    if measurement.by_category:
        parts.append(
            _section("At the peak, by category", _measured_categories(measurement, prediction))
        )
    parts += ["", Text("error = predicted / measured - 1", style="dim")]
    return _at_page_width(*parts)


def _measured_rows(
    measurement: Measurement, prediction: Prediction | None
) -> list[tuple[str, int | None, int | None]]:
    """Pair each measured figure with the predicted one: ``(name, measured, predicted)``."""
    peak_bytes = measurement.predicted_peak_bytes
    if prediction is None:
        return [
            ("peak allocated", measurement.peak_allocated_bytes, peak_bytes),
            ("peak reserved", measurement.peak_reserved_bytes, None),
            ("process", measurement.process_bytes, None),
            ("first step peak", measurement.first_step_peak_bytes, None),
        ]
    return [
        ("peak allocated", measurement.peak_allocated_bytes, prediction.peak_allocated_bytes),
        ("peak reserved", measurement.peak_reserved_bytes, prediction.peak_reserved_bytes),
        ("process", measurement.process_bytes, prediction.process_bytes),
        ("first step peak", measurement.first_step_peak_bytes, prediction.first_step_peak_bytes),
    ]


def _measured_categories(measurement: Measurement, prediction: Prediction | None) -> Table:
    """Pair the categories at the measured peak with those at the predicted one."""
    table = _grid(header=True)
    table.add_column("")
    for column in ("measured", "predicted", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, measured in largest_first(measurement.by_category):
        predicted = prediction.by_category.get(name, 0) if prediction else None
        table.add_row(
            Text(name), _bytes(measured), _bytes(predicted), signed_error(predicted, measured)
        )
    return table


def _bytes(num_bytes: int | None) -> str:
    """Write bytes, or a dash where they are unknown."""
    return "-" if num_bytes is None else format_bytes(num_bytes)


def plan_table(rows: Sequence[ConsideredPlan]) -> RenderableType:
    """Show the plans that were considered, the chosen one marked, each with its reason."""
    table = _grid(header=True)
    table.add_column("", no_wrap=True)
    table.add_column("plan", overflow="fold")
    table.add_column("numerics", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for row in rows:
        plan = Text(
            plan_name(row.strategies, width=_PLAN_WIDTH), style="bold" if row.chosen else ""
        )
        if row.reason:
            plan.append(f"\n{row.reason}", style="not bold dim")
        table.add_row(
            ">" if row.chosen else "",
            plan,
            Text(row.numerics),
            format_bytes(row.peak_bytes),
            format_seconds(row.step_seconds),
            _yes_or_no(row.fits),
        )
    return _at_page_width(Text("Plans considered (> chosen)", style="bold"), table)


def explanation_text(
    plain: Prediction,
    planned: Prediction,
    *,
    budget_bytes: int | None = None,
    rows: Sequence[ConsideredPlan] = (),
) -> RenderableType:
    """Tell what a plan changes, one wrapped sentence per line."""
    table = _grid()
    table.add_column(no_wrap=True)
    table.add_column()
    for line in explanation_lines(plain, planned, budget_bytes=budget_bytes, rows=rows):
        table.add_row("-", Text(line))
    return _at_page_width(table)
