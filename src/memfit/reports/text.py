"""Reports for a terminal: rich renderables that fit 80 columns and use up to 120.

No renderable prints; the caller gives it to its own console. Those of a prediction and of a
plan have files of their own and are named here, so that a command finds all in one place.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memfit.devices.spec import CPU
from memfit.figures import Measurement, Prediction
from memfit.units import format_bytes, format_seconds

from .brief_text import fact_table, next_section, plan_rows
from .plan_text import plan_report as plan_report
from .plan_text import plan_table as plan_table
from .prediction_text import prediction_table as prediction_table
from .terminal import INDENT, amount, at_page_width, dashed, grid, section
from .wording import largest_first, plan_name, signed_error

_NUM_CATEGORIES = 4
_Row = tuple[str, int | None, int | None]
"""A name with what was measured and what was predicted, None where that is not known."""


def measurement_table(
    measurement: Measurement, prediction: Prediction | None = None
) -> RenderableType:
    """Show a measured step with the predicted figures beside it and the signed error.

    The error is predicted over measured minus one: above zero, too much was predicted. Without a
    prediction, only the peak that the measurement carries is compared.
    """
    table = _side_by_side(_measured_rows(measurement, prediction))
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
        Padding(Text(plan), INDENT),
        Padding(table, INDENT),
    ]
    if measurement.by_category:
        by_category = _side_by_side(_measured_categories(measurement, prediction))
        parts.append(section("At the peak, by category", by_category))
    parts += ["", Text("error = predicted / measured - 1", style="dim")]
    if measurement.notes:
        parts.append(section("Good to know", dashed([Text(f"{n}.") for n in measurement.notes])))
    return at_page_width(*parts)


def brief_measurement(
    measurement: Measurement, prediction: Prediction | None = None
) -> RenderableType:
    """Say what a step took and how far the prediction was off, then what holds the peak."""
    took = format_bytes(measurement.peak_allocated_bytes)
    predicted_bytes = measurement.predicted_peak_bytes
    if prediction is not None:
        predicted_bytes = prediction.peak_allocated_bytes
    sentence = f"The step took {took} and {format_seconds(measurement.step_seconds)}"
    if predicted_bytes is not None:
        off = signed_error(predicted_bytes, measurement.peak_allocated_bytes)
        sentence += f"; predicted were {format_bytes(predicted_bytes)} ({off})"
    heading = f"Measured on {measurement.device}, batch size {measurement.batch_size:,}"
    table = _side_by_side(_measured_rows(measurement, prediction))
    parts: list[RenderableType] = [
        Text(f"{sentence}.", style="bold"),
        Text(heading, style="dim"),
        Padding(fact_table(plan_rows(measurement.strategies, measurement.numerics)), INDENT),
        Padding(table, INDENT),
    ]
    if measurement.by_category:
        rows = _measured_categories(measurement, prediction)[:_NUM_CATEGORIES]
        parts.append(section("At the peak, by category", _side_by_side(rows)))
    notes = [f"{note}." for note in measurement.notes]
    return at_page_width(*parts, next_section(notes))


def _side_by_side(rows: Sequence[_Row]) -> Table:
    """Show measured bytes with the predicted ones beside them and the signed error."""
    table = grid(Column(), *map(amount, ("measured", "predicted", "error")))
    for name, measured, predicted in rows:
        table.add_row(
            Text(name), _bytes(measured), _bytes(predicted), signed_error(predicted, measured)
        )
    return table


def _measured_rows(measurement: Measurement, prediction: Prediction | None) -> list[_Row]:
    """Pair each measured figure with the predicted one."""
    peak_bytes = measurement.predicted_peak_bytes
    if prediction is None:
        return [
            ("peak allocated", measurement.peak_allocated_bytes, peak_bytes),
            ("peak reserved", measurement.peak_reserved_bytes, None),
            ("process", measurement.process_bytes, None),
            ("first step peak", measurement.first_step_peak_bytes, None),
        ]
    # Of a CPU's process the most since it began is measured, and the step predicted, with a guess.
    process_bytes = None if measurement.device == CPU else prediction.process_bytes
    return [
        ("peak allocated", measurement.peak_allocated_bytes, prediction.peak_allocated_bytes),
        ("peak reserved", measurement.peak_reserved_bytes, prediction.peak_reserved_bytes),
        ("process", measurement.process_bytes, process_bytes),
        ("first step peak", measurement.first_step_peak_bytes, prediction.first_step_peak_bytes),
    ]


def _measured_categories(measurement: Measurement, prediction: Prediction | None) -> list[_Row]:
    """Pair the categories at the measured peak with those at the predicted one."""
    predicted = None if prediction is None else prediction.by_category
    return [
        (name, measured, None if predicted is None else predicted.get(name, 0))
        for name, measured in largest_first(measurement.by_category)
    ]


def _bytes(num_bytes: int | None) -> str:
    """Write bytes, or a dash where they are unknown."""
    return "-" if num_bytes is None else format_bytes(num_bytes)
