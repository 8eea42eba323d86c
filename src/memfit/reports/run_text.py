"""A run that keeps a journal, in the terminal: how it stands, its figures, and what grew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

from memfit.journal.records import LeakEvent, OutOfMemoryEvent, PlanClimbedEvent
from memfit.journal.sentences import drift_sentence, event_sentence

from .run_contents import RunReport, Told
from .run_wording import headline_cards, rank_row, verdict
from .terminal import INDENT, at_page_width, grid, section, word

_STYLES = {"good": "green", "warn": "yellow", "bad": "bold red", "": "bold"}
_MOST_LINES = 10


def run_summary(report: RunReport, files: Sequence[Path]) -> RenderableType:
    """Summarise a run, and name the files that were written."""
    found = verdict(report)
    parts: list[RenderableType] = [
        Text(report.title, style="bold"),
        Text(f"{found.words}. {found.sentence}", style=_STYLES[found.tone]),
    ]
    if found.remedy:
        parts.append(Text(found.remedy))
    # The headline numbers of the page, but for the first, which is the verdict.
    table = grid(Column(style="dim", no_wrap=True), word(), Column(style="dim"))
    for card in headline_cards(report)[1:]:
        notes = Text(", ".join(card.notes))
        table.add_row(card.label.lower(), Text(card.value, style=_STYLES[card.tone]), notes)
    parts += ["", Padding(table, INDENT)]
    events: list[Told[OutOfMemoryEvent | PlanClimbedEvent]]
    events = [*report.out_of_memory, *report.climbs]
    blocks = {
        "What kept growing": [_leak_line(told.event) for told in report.leaks],
        "Out of memory and plans": [event_sentence(told.event) for told in events],
        "Other than predicted": [drift_sentence(told.event) for told in report.drifts],
        "Left out": list(report.notes),
    }
    parts += [section(title, _listed(lines)) for title, lines in blocks.items() if lines]
    if len(report.ranks) > 1:
        names = ("rank", "ended", "steps", "step", "allocated", "reserved", "host")
        ranks = grid(*(Column(n, justify="left" if n == "ended" else "right") for n in names))
        for rank in report.ranks:
            ranks.add_row(*map(Text, rank_row(rank)[: len(ranks.columns)]))
        parts.append(section("Ranks", ranks))
    if files:
        parts.append(section("Written", _listed([str(path) for path in files])))
    return at_page_width(*parts)


def _leak_line(leak: LeakEvent) -> str:
    """Name the holder, and the line that makes what it holds."""
    made = f", made at {leak.source_line}" if leak.source_line else ""
    return f"{leak.holder} ({leak.kind}{made}): {leak.sentence}"


def _listed(lines: Sequence[str]) -> RenderableType:
    """List lines, and count those past the first few."""
    shown = [Text(line) for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        shown.append(Text(f"and {len(lines) - _MOST_LINES:,} more", style="dim"))
    return Group(*shown)
