"""A step recorded in advance at many places, for a terminal: a row each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from memfit.prediction.recorded_table import Cell
from memfit.units import format_bytes, format_seconds

from .terminal import INDENT, amount, at_page_width, dashed, folded, grid, word
from .wording import FIGURE_NAMES, verdict

_STYLES = {"yes": "green", "no": "bold red", "uncertain": "bold yellow", "-": "dim"}


def cells_table(cells: Sequence[Cell], *, job: str, device: str) -> RenderableType:
    """Show every place of a table: what it would take, whether it fits, and the seconds.

    Args:
        cells: the places, in the order in which they are shown.
        job: how the job was named.
        device: where it would run.
    """
    names = list(cells[0].settings)
    has_plans = len({cell.plan for cell in cells}) > 1
    plan = [folded("plan")] if has_plans else []
    table = grid(
        *plan,
        *map(amount, (*names, "batch")),
        *map(amount, (figure_name(cells), "step")),
        word("fits"),
    )
    for cell in cells:
        asked = [f"{cell.settings[name]}" for name in names]
        table.add_row(
            *([Text(cell.plan)] if has_plans else []),
            *map(Text, asked),
            f"{cell.batch_size:,}",
            bytes_words(cell),
            seconds_words(cell),
            Text(fits_words(cell), style=_STYLES[_verdict(cell)]),
        )
    parts: list[RenderableType] = [
        Text(largest_words(cells), style="bold"),
        Text(f"{job} on {device}, every row recorded", style="dim"),
        Padding(table, INDENT),
    ]
    if reasons := missing_words(cells):
        parts += ["", Text("No answer", style="bold")]
        parts.append(Padding(dashed(map(Text, reasons)), INDENT))
    return at_page_width(*parts)


def largest_words(cells: Sequence[Cell]) -> str:
    """Name the largest batch that fits, and where; at least that where none larger did not."""
    fitting = [cell for cell in cells if cell.prediction is not None and cell.prediction.fits]
    known = [cell for cell in cells if cell.prediction is not None]
    if not fitting:
        return "None of them fits." if known else "None of them could be recorded."
    best = max(fitting, key=lambda cell: (cell.batch_size, -_seconds(cell)))
    larger = [cell for cell in cells if cell.batch_size > best.batch_size]
    at_least, why = "", ""
    if not any(cell in known and _with(cell) == _with(best) for cell in larger):
        at_least, why = "at least ", f", the largest {'recorded' if larger else 'asked for'}"
    return (
        f"{len(fitting)} of {len(cells)} fit. The largest batch is {at_least}{best.batch_size:,}"
        f"{why}{_with(best)}: {bytes_words(best)}, {seconds_words(best)} a step."
    )


def missing_words(cells: Sequence[Cell]) -> list[str]:
    """Say why places have no answer, each reason once with how many it holds for."""
    reasons: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.reason:
            reasons.setdefault(cell.reason, []).append(cell)
    return [
        f"batch size {found[0].batch_size:,}{_with(found[0])}"
        f"{f' and {len(found) - 1} more' if len(found) > 1 else ''}: {reason}"
        for reason, found in reasons.items()
    ]


def figure_name(cells: Sequence[Cell]) -> str:
    """Name the figure that the budget bounds."""
    found = next((cell.prediction for cell in cells if cell.prediction is not None), None)
    return FIGURE_NAMES["allocated" if found is None else found.budget_of]


def bytes_words(cell: Cell) -> str:
    """Write the figure that the budget bounds."""
    return "-" if cell.prediction is None else format_bytes(cell.prediction.bounded_bytes())


def seconds_words(cell: Cell) -> str:
    """Write the seconds of a step, an estimate."""
    return "-" if cell.prediction is None else format_seconds(cell.prediction.step_seconds)


def fits_words(cell: Cell) -> str:
    """Write whether it fits, or by how much it is over."""
    found = cell.prediction
    if found is not None and found.fits is False and found.budget_bytes:
        over_bytes = found.bounded_bytes() - found.budget_bytes
        if over_bytes > 0:
            return f"{format_bytes(over_bytes)} over"
    return _verdict(cell)


def _verdict(cell: Cell) -> str:
    return "-" if cell.prediction is None else verdict(cell.prediction)


def _seconds(cell: Cell) -> float:
    return 0.0 if cell.prediction is None else cell.prediction.step_seconds


def _with(cell: Cell) -> str:
    """Write the settings and the plan of a place."""
    words = [f"{name}={value}" for name, value in cell.settings.items()]
    words += [cell.plan] if cell.plan != "plain" else []
    return f" with {', '.join(words)}" if words else ""
