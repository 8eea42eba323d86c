"""A plan on one screen: whether it fits, what it does in words, what it costs, and what next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memfit.figures import Approximation
from memfit.planner.result.planning_result import PlanningResult
from memfit.units import format_bytes, format_seconds

from .brief_text import (
    SCREEN_LINES,
    fact_table,
    next_section,
    num_lines_of,
    plan_rows,
    verdict_text,
)
from .plan_rows import (
    chosen_row,
    curve,
    is_measured,
    lost_remedies,
    plain_row,
    predicted,
)
from .terminal import INDENT, amount, at_page_width, grid
from .wording import change, instead_of, place_words, shorten

_MOST_LOST = 1
_MOST_REASONS = 2
_MOST_LINES = 2
_LINE_WIDTH = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeRow:
    """One way to run the step beside the plan: its name, peak, time and how it differs."""

    name: str
    peak_bytes: int
    step_seconds: float
    difference: str = ""
    is_chosen: bool = False


def brief_plan(plan: PlanningResult, commands: Sequence[str] = ()) -> RenderableType:
    """Show whether a plan fits, what it does, and what it takes beside the step as it is.

    Args:
        plan: what was found.
        commands: what may be typed next, a sentence each.
    """
    prediction = predicted(plan)
    facts = plan_rows(prediction.strategies, prediction.numerics)
    if prediction.ranks > 1:
        facts.append(("ranks", Text(f"{prediction.ranks}; all figures are of one of them")))
    reasons = [_cut(reason, _MOST_LINES * 66) for reason in plan.reasons[:_MOST_REASONS]]
    facts += [("", Text(reason, style="dim")) for reason in reasons]
    batch = f", batch size {prediction.batch_size:,}" if prediction.batch_size else ""
    trades = trade_rows(plan)
    said = [fact.plain for _, fact in facts]
    num_lines = num_lines_of(said, 66) + num_lines_of(commands, _LINE_WIDTH) + len(trades) + 8
    parts: list[RenderableType] = [
        verdict_text(prediction),
        Text(f"Planned step on {place_words(prediction)}{batch}", style="dim"),
        Padding(fact_table(facts), INDENT),
        "",
        Padding(_trade_table(trades), INDENT),
        Padding(Text(_known(plan), style="dim"), INDENT),
        next_section([*commands, *_worth_knowing(plan, SCREEN_LINES - num_lines)]),
    ]
    return at_page_width(*parts)


def trade_rows(plan: PlanningResult) -> tuple[TradeRow, ...]:
    """Return the step as it is, the plan, and what a little more or less memory would take."""
    return tuple(_trades(plan))


def _trades(plan: PlanningResult) -> Iterator[TradeRow]:
    prediction, plain, chosen = (
        predicted(plan),
        plain_row(plan.considered),
        chosen_row(plan.considered),
    )
    if plain is not None and plain is not chosen:
        yield TradeRow(
            name="as it is", peak_bytes=plain.peak_bytes, step_seconds=plain.step_seconds
        )
    yield TradeRow(
        name="this plan",
        peak_bytes=prediction.bounded_bytes(),
        step_seconds=prediction.step_seconds,
        is_chosen=True,
    )
    own = prediction.strategies
    points = [point for point in curve(plan) if point.is_recorded]
    place = next((index for index, point in enumerate(points) if point.is_chosen), 0)
    if place > 0 and points[place - 1].strategies:
        faster = points[place - 1]
        yield TradeRow(
            name="more memory",
            peak_bytes=faster.peak_bytes,
            step_seconds=faster.step_seconds,
            difference=instead_of(faster.strategies, own),
        )
    if plan.ladder:
        smaller = predicted(plan.ladder[0])
        yield TradeRow(
            name="less memory",
            peak_bytes=smaller.bounded_bytes(),
            step_seconds=smaller.step_seconds,
            difference=instead_of(plan.ladder[0].labels(), own),
        )
    if plan.approximations:
        best: Approximation = min(plan.approximations, key=lambda each: each.step_seconds)
        yield TradeRow(
            name=f"--allow {best.allow}",
            peak_bytes=best.peak_bytes,
            step_seconds=best.step_seconds,
            difference="changes the results",
        )


def _trade_table(rows: Sequence[TradeRow]) -> Table:
    """Show ways to run the step, with their changes against the step as it is."""
    plain = next((row for row in rows if row.name == "as it is"), None)
    changes = [] if plain is None else [amount("to plain"), amount("to plain")]
    columns = [amount("peak"), *changes[:1], amount("step"), *changes[1:]]
    table = grid(Column(no_wrap=True), *columns, Column())
    for row in rows:
        figures = [format_bytes(row.peak_bytes), format_seconds(row.step_seconds)]
        if plain is not None:
            figures.insert(1, "" if row is plain else change(row.peak_bytes, plain.peak_bytes))
            figures.append("" if row is plain else change(row.step_seconds, plain.step_seconds))
        difference = Text(
            shorten(row.difference, 60), style="dim", no_wrap=True, overflow="ellipsis"
        )
        table.add_row(Text(row.name), *figures, difference, style="bold" if row.is_chosen else "")
    return table


def _known(plan: PlanningResult) -> str:
    """Say how the figures are known."""
    if is_measured(plan):
        return "The plan's time was measured here; the others are estimates."
    return "Peaks are recorded; times are estimates, to compare plans by."


def _worth_knowing(plan: PlanningResult, num_lines: int) -> Iterator[str]:
    """Say what was lost most by what is left out, and what the job's owner may not have meant.

    A sentence gets two lines at most, and as many as there are left; --verbose has it whole.
    """
    lost = [
        f"{each.names} could take off up to {format_bytes(each.most_bytes)}, but {each.sentence}"
        for each in lost_remedies(plan)[:_MOST_LOST]
    ]
    notes = (*predicted(plan).notes, *plan.notes)
    for sentence in (*lost, *notes[:1]):
        room = _LINE_WIDTH * min(_MOST_LINES, num_lines)
        if room > 0:
            yield _cut(sentence, room)
            num_lines -= num_lines_of([sentence[:room]], _LINE_WIDTH)


def _cut(sentence: str, room: int) -> str:
    return sentence if len(sentence) <= room else f"{sentence[: room - 3].rstrip()}..."
