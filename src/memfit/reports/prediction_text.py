"""Predictions for a terminal: one in full, or several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memfit.figures import Advice, Certainty, Holder, Prediction, Term
from memfit.units import format_bytes, format_seconds

from .brief_text import module_table
from .terminal import (
    INDENT,
    Bar,
    Fitted,
    Name,
    amount,
    at_page_width,
    certainty_mark,
    dashed,
    grid,
    section,
    word,
)
from .wording import (
    advice_sentence,
    answer_sentences,
    fits_sentence,
    interval_words,
    is_uncertain,
    is_within,
    largest_first,
    module_name,
    percent,
    place_words,
    plan_name,
    process_certainty,
    shorten,
)

_NAME_WIDTH = 30
_WHERE_WIDTH = 44
_PLAN_WIDTH = 61
_SOURCE_WIDTH = 29
_TOP = 10
_VERDICT_STYLES = {"yes": "green", "no": "bold red", "uncertain": "bold yellow", "-": "dim"}


def _time_mark(prediction: Prediction) -> Text:
    """Mark the step time, which is never exact."""
    if prediction.certainty is Certainty.GUESS:
        return certainty_mark(Certainty.GUESS)
    return Text("estimate", style="dim")


def prediction_table(
    prediction: Prediction,
    advice: Sequence[Advice] = (),
    *,
    top: int = _TOP,
    depth: int | None = None,
) -> RenderableType:
    """Show one prediction: headline, fit, advice, categories, modules, blocks and terms.

    Args:
        prediction: what is shown.
        advice: what would change it, shown where there is any.
        top: how many of the largest modules and blocks are shown.
        depth: how many levels of modules are unfolded; None unfolds the largest.
    """
    title = Text(f"Predicted step on {place_words(prediction)}", style="bold")
    return at_page_width(title, *prediction_parts(prediction, advice, top=top, depth=depth))


def prediction_parts(
    prediction: Prediction,
    advice: Sequence[Advice] = (),
    *,
    top: int = _TOP,
    depth: int | None = None,
) -> list[RenderableType]:
    """Return the parts of one prediction below its title, as ``prediction_table`` shows them."""
    within = is_within(prediction, prediction.budget_bytes)
    style = {True: "green", False: "bold red", None: ""}[within]
    if is_uncertain(prediction):
        style = _VERDICT_STYLES["uncertain"]
    parts: list[RenderableType] = [
        Padding(_headline(prediction), INDENT),
        Padding(Text(fits_sentence(prediction, prediction.budget_bytes), style=style), INDENT),
    ]
    peak_bytes = prediction.peak_allocated_bytes
    if advice:
        sentences = (Text(advice_sentence(entry)) for entry in advice)
        parts.append(section("What would change the answer", dashed(sentences)))
    if prediction.notes:
        parts.append(
            section("Good to know", Text("\n".join(f"- {each}." for each in prediction.notes)))
        )
    if prediction.by_category:
        table = grid(word(), amount(), amount(), word())
        for name, num_bytes in largest_first(prediction.by_category):
            table.add_row(
                Name(name, _NAME_WIDTH),
                format_bytes(num_bytes),
                percent(num_bytes, peak_bytes),
                Bar(min(1.0, num_bytes / peak_bytes) if peak_bytes else 0.0),
            )
        parts.append(section("At the peak, by category", table))
    if prediction.by_module:
        table = module_table(prediction, most_rows=top, depth=depth)
        parts.append(section("At the peak, by module", table))
    if prediction.largest:
        holders = _holders(prediction.largest, top)
        parts.append(section("Largest allocations at the peak", holders))
    if prediction.terms:
        parts.append(section("Terms", _terms(prediction.terms)))
    if prediction.answers:
        parts.append(answers_section(answer_sentences(prediction.answers)))
    return parts


def answers_section(lines: Sequence[str]) -> RenderableType:
    """Show what was answered without being known, a line each."""
    return section("Answered without knowing", dashed(map(Text, lines)))


def _headline(prediction: Prediction) -> RenderableType:
    """Show the peaks and the step time, each with how it is known and its interval."""
    table = grid(Column(), Column(justify="right"), Column(), Column())
    certainty = certainty_mark(prediction.certainty)
    rows = [
        ("peak allocated", prediction.peak_allocated_bytes, certainty, "allocated"),
        ("peak reserved", prediction.peak_reserved_bytes, certainty, "reserved"),
        (
            "process",
            prediction.process_bytes,
            certainty_mark(process_certainty(prediction)),
            "process",
        ),
        ("first step peak", prediction.first_step_peak_bytes, certainty, ""),
    ]
    for name, num_bytes, mark, figure in rows:
        style = "bold" if figure == "allocated" else ""
        interval = interval_words(prediction.intervals.get(figure))
        table.add_row(
            name, Text(format_bytes(num_bytes), style=style), mark, Text(interval, style="dim")
        )
    if prediction.smallest_memory_bytes is not None:
        smallest = format_bytes(prediction.smallest_memory_bytes)
        note = Text("the least card memory that it runs in", style="dim")
        table.add_row("survives in", smallest, certainty, note)
        unused = f"{100 * prediction.fragmentation_fraction:.1f} %"
        note = Text("of the reserved bytes lie unused", style="dim")
        table.add_row("fragmentation", unused, certainty, note)
    for name, num_bytes in (
        ("on the host", prediction.host_bytes),
        ("on disk", prediction.disk_bytes),
    ):
        if num_bytes:
            table.add_row(name, format_bytes(num_bytes), certainty)
    table.add_row("step time", format_seconds(prediction.step_seconds), _time_mark(prediction))
    if prediction.batch_size is not None:
        table.add_row("batch size", f"{prediction.batch_size:,}")
    return Group(table, _plan_rows(prediction))


def _plan_rows(prediction: Prediction) -> Table:
    """Show the plan and its numerics, which are as long as they are."""
    plan = Table.grid(Column(min_width=15), Column(overflow="fold"), padding=(0, 2, 0, 0))
    if prediction.batch_size is not None:
        name = plan_name(prediction.strategies)
        if len(name) > _PLAN_WIDTH:
            name = "\n+ ".join(prediction.strategies)
        plan.add_row("plan", Text(name))
        plan.add_row("numerics", Text(prediction.numerics))
    return plan


def _holders(holders: Sequence[Holder], top: int) -> Table:
    """Show the largest blocks that live at the peak, and below each where it comes from."""
    table = grid(amount("bytes"), word("category"), word("module, operator, phase and line"))
    for holder in sorted(holders, key=lambda holder: -holder.num_bytes)[:top]:
        where = Fitted(partial(_where, holder), _WHERE_WIDTH)
        table.add_row(format_bytes(holder.num_bytes), Text(holder.category), where)
    return table


def _where(holder: Holder, width: int) -> Text:
    """Write where a block comes from."""
    where = Text(_block_name(holder, width))
    if origin := _origin(holder, width):
        where.append(f"\n{origin}", style="dim")
    return where


def _block_name(holder: Holder, width: int) -> str:
    """Write module and operator of a block; the module gives way where both are long."""
    operator = shorten(holder.operator, width // 2)
    room = width - len(operator) - 2
    return ", ".join(part for part in (shorten(module_name(holder.module), room), operator) if part)


def _origin(holder: Holder, width: int) -> str:
    """Write phase and line of a block."""
    room = width - len(holder.phase) - 2
    return ", ".join(part for part in (holder.phase, shorten(holder.source_line, room)) if part)


def _terms(terms: Sequence[Term]) -> Table:
    """Show the terms of a peak, each with how it is known and from where."""
    table = grid(Column("term", max_width=26), amount("bytes"), word("known"), word("source"))
    for term in terms:
        table.add_row(
            Text(term.name),
            format_bytes(term.num_bytes),
            certainty_mark(term.certainty),
            Fitted(partial(_cut, term.source), _SOURCE_WIDTH),
        )
    return table


def _cut(sentence: str, width: int) -> Text:
    """Cut the end off a sentence that is wider than ``width`` characters; the page has it whole."""
    is_whole = len(sentence) <= width
    return Text(sentence if is_whole else f"{sentence[: width - 3].rstrip()}...", style="dim")
