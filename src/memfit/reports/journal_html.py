"""The page of a run that keeps a journal: a single file that asks nothing of the network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.files import write_atomically
from memfit.journal.sentences import drift_sentence

from .html import page_environment
from .journal_contents import JournalReport
from .journal_plots import has_memory, ranks_figure, run_figure, step_figure
from .journal_wording import headline_cards, rank_row, verdict
from .plots import png_bytes, svg_text

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

GENERATOR = "memfit report"
"""Marks the pages that may be written over."""
_PAGE_NAMES = ("report.html", "run-report.html")
"""The second is for a folder whose ``report.html`` somebody else has written."""
_HEAD_CHARACTERS = 2000
_INLINE_POINTS = 1600
_MOST_ROWS = 30
_QUOTED = re.compile(r"`([^`\n]+)`")


def journal_html(report: JournalReport) -> str:
    """Render a run as one self-contained page.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.
    """
    environment = page_environment()
    environment.filters["prose"] = _prose
    template = environment.get_template("journal.html.j2")
    pictures = {
        name: svg_text(figure, prefix=name)
        for name, figure in _figures(report, max_points=_INLINE_POINTS).items()
    }
    return template.render(
        report=report,
        generator=GENERATOR,
        facts=_facts(report),
        verdict=verdict(report),
        cards=headline_cards(report),
        run_picture=pictures.get("run-peaks", ""),
        step_picture=pictures.get("run-step", ""),
        ranks_picture=pictures.get("run-ranks", ""),
        has_ranks=len(report.ranks) > 1,
        drifts=_drifts(report),
        changes=report.plan_changes(),
        ranks=[rank_row(rank) for rank in report.ranks],
        most_rows=_MOST_ROWS,
    )


def write_journal_report(report: JournalReport) -> list[Path]:
    """Write the page and its pictures into the run folder, and give their paths, the page first.

    All are rendered before any is written. A ``report.html`` of somebody else stays as it is.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.
    """
    page = journal_html(report).encode()
    pictures = {
        report.folder / f"{name}.png": png_bytes(figure)
        for name, figure in _figures(report).items()
    }
    page_path = report.folder / _page_name(report.folder)
    for path, picture in pictures.items():
        write_atomically(path, picture)
    write_atomically(page_path, page)
    return [page_path, *pictures]


def _prose(text: str) -> Markup:
    """Set what a sentence quotes in backticks as code."""
    from markupsafe import Markup, escape

    return Markup(_QUOTED.sub(r"<code>\1</code>", str(escape(text))))


def _page_name(folder: Path) -> str:
    """Choose a name that nobody else has taken."""
    first, second = _PAGE_NAMES
    path = folder / first
    if not path.exists():
        return first
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(_HEAD_CHARACTERS)
    return first if f'content="{GENERATOR}"' in head else second


def _figures(report: JournalReport, *, max_points: int = 4000) -> dict[str, Figure]:
    """Draw what there is to draw, by the name of its file."""
    figures = {
        "run-peaks": run_figure(report, max_points=max_points) if has_memory(report) else None,
        "run-step": step_figure(report, max_points=max_points),
        "run-ranks": ranks_figure(report),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _facts(report: JournalReport) -> list[tuple[str, str]]:
    if report.facts is None:
        return [("Folder", str(report.folder))]
    facts = report.facts
    started = facts.started_at.replace("T", " ").partition(".")[0]
    found = [("Device", facts.device), ("Started", started), ("Process", str(facts.process_id))]
    if facts.host_name:
        found.append(("Host", facts.host_name))
    if facts.num_ranks > 1:
        found.append(("Ranks", f"{facts.num_ranks:,}"))
    return found


def _drifts(report: JournalReport) -> list[str]:
    sentences = []
    for told in report.drifts[:_MOST_ROWS]:
        whose = f"Rank {told.rank}: " if len(report.ranks) > 1 else ""
        sentences.append(f"{whose}{drift_sentence(told.event)}")
    return sentences
