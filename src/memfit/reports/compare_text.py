"""A comparison of two peaks for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from memfit.peak_changes.comparison import Comparison, LineChange
from memfit.peak_changes.parts import PartChange, rest_of
from memfit.units import format_bytes

from .compare_wording import (
    budget_sentence,
    exact_bytes,
    figure_rows,
    notes,
    side_words,
    signed_bytes,
    tone,
    verdict_sentence,
    what_words,
    where_words,
)
from .terminal import Fitted, amount, at_page_width, dashed, folded, grid, section, word
from .wording import change_words, module_name, shorten

_STYLES = {"good": "green", "bad": "bold red", "": ""}
_NAME_WIDTH = 34


def compare_report(found: Comparison, *, top: int) -> RenderableType:
    """Show a comparison: verdict, sides, notes, lines, modules, categories and other figures.

    Args:
        found: what was compared.
        top: how many lines and modules are shown.
    """
    return at_page_width(*_parts(found, top))


def _parts(found: Comparison, top: int) -> Iterator[RenderableType]:
    yield Text(verdict_sentence(found), style=_STYLES[tone(found)])
    if sentence := budget_sentence(found):
        yield Text(sentence, style="bold red" if found.fits_no_more else "")
    sides = grid(word(), Column(overflow="fold"))
    for name, side in (("before", found.before), ("after", found.after)):
        sides.add_row(
            Text(name, style="dim"),
            Text.assemble(side.source, "  ", (side_words(side), "dim")),
        )
    yield Padding(sides, (1, 0, 0, 2))
    if said := notes(found):
        yield section("Good to know", dashed(map(Text, said)))
    if found.lines:
        yield section("What came and went at the peak, by line", _lines(found.lines, top))
    if found.modules:
        yield section("By module", _table(found.modules, top, folds=True))
    changed = [row for row in found.categories if row.change_bytes]
    if changed:
        yield section("By category", _table(changed, len(changed)))
    if figures := figure_rows(found):
        yield section("Other figures", _figures(figures))


def _lines(lines: Sequence[LineChange], top: int) -> Table:
    """Show lines: how much came, where, the code, and the bytes of each category."""
    table = grid(amount(), Column(overflow="fold"))
    for line in lines[:top]:
        about = Text(where_words(line), style="bold")
        if line.code_before:
            about.append(f"\n- {line.code_before}", style="dim")
        if line.code:
            about.append(f"\n{'+ ' if line.code_before else ''}{line.code}", style="not bold")
        about.append(f"\n{what_words(line)}", style="not bold dim")
        table.add_row(_signed(line.change_bytes), about)
    rest = lines[top:]
    if rest:
        rest_bytes = sum(line.change_bytes for line in rest)
        others = f"({len(rest)} others) {exact_bytes(rest_bytes)}"
        table.add_row(_signed(rest_bytes), Text(others, style="dim"))
    return table


def _table(rows: Sequence[PartChange], top: int, *, folds: bool = False) -> Table:
    """Show parts before and after."""
    name = folded("") if folds else word()
    table = grid(name, *map(amount, ("before", "after", "change", "")))
    rest = rest_of(rows, top)
    for row in [*rows[:top], *([] if rest is None else [rest])]:
        count = f" ({row.num_members} modules)" if row.num_members > 1 else ""
        table.add_row(
            Fitted(partial(_counted, module_name(row.name), count), _NAME_WIDTH),
            format_bytes(row.before_bytes),
            format_bytes(row.after_bytes),
            _signed(row.change_bytes),
            Text(change_words(row.before_bytes, row.after_bytes), style="dim"),
        )
    return table


def _counted(name: str, count: str, width: int) -> Text:
    return Text(f"{shorten(name, width)}{count}")


def _signed(num_bytes: int) -> Text:
    """Write a change in the colour of what it means."""
    style = "" if not num_bytes else "red" if num_bytes > 0 else "green"
    return Text(signed_bytes(num_bytes), style=style)


def _figures(rows: Sequence[tuple[str, str, str, str]]) -> Table:
    table = grid(word(), *map(amount, ("before", "after", "")))
    for name, before, after, change in rows:
        table.add_row(Text(name), before, after, Text(change, style="dim"))
    return table
