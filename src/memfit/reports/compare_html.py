"""The page of a comparison: a single file that asks nothing of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.peak_changes.comparison import Comparison
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
from .page import TOP_MODULES, Headline, PeakPart, page_environment, peak_parts

_MOST_LINES = 50


def compare_html(found: Comparison) -> str:
    """Render a comparison as one self-contained page.

    Raises:
        MissingExtraError: if jinja2 is not installed.
    """
    lines = found.lines or ()
    more = lines[_MOST_LINES:]
    return (
        page_environment()
        .get_template("compare.html.j2")
        .render(
            before=found.before,
            after=found.after,
            sides=[
                (name, side.source, side_words(side))
                for name, side in (("Before", found.before), ("After", found.after))
            ],
            tone=tone(found),
            verdict=verdict_sentence(found),
            budget=budget_sentence(found),
            fits_no_more=found.fits_no_more,
            cards=_cards(found),
            notes=notes(found),
            lines=_line_rows(found),
            more_lines=len(more),
            more_change=exact_bytes(sum(line.change_bytes for line in more)),
            categories=_peak_parts(found, found.categories),
            modules=_peak_parts(found, _most_changed(found.modules)),
            figures=figure_rows(found),
        )
    )


def _cards(found: Comparison) -> list[Headline]:
    """Choose the headline numbers."""
    before, after = found.before, found.after
    change = Headline(
        label="Change",
        value=signed_bytes(found.change_bytes),
        notes=(
            exact_bytes(found.change_bytes),
            f"{format_bytes(found.tolerance_bytes)} allowed",
        ),
        tone="bad" if found.is_regression else "",
    )
    peaks = [
        Headline(
            label=f"Peak {name}", value=format_bytes(side.peak_bytes), notes=(side.kind.value,)
        )
        for name, side in (("before", before), ("after", after))
    ]
    others = [
        Headline(label=name.capitalize(), value=value, notes=(f"{was} before", change_of))
        for name, was, value, change_of in figure_rows(found)
        if name in ("process", "step time", "predicted peak")
    ]
    return [*peaks, change, *others[:2]]


def _line_rows(found: Comparison) -> list[dict[str, Any]]:
    """Return what is shown of each line."""
    return [
        {
            "change_bytes": line.change_bytes,
            "change": signed_bytes(line.change_bytes),
            "where": where_words(line),
            "code": line.code,
            "code_before": line.code_before,
            "what": what_words(line),
        }
        for line in (found.lines or ())[:_MOST_LINES]
    ]


def _most_changed(rows: Sequence[PartChange]) -> list[PartChange]:
    """Keep the modules that changed most, with the rest in one row."""
    rest = rest_of(rows, TOP_MODULES)
    return [*rows[:TOP_MODULES], *([] if rest is None else [rest])]


def _peak_parts(found: Comparison, rows: Sequence[PartChange]) -> list[PeakPart]:
    """Set the parts beside each other, with bars."""
    return peak_parts(
        {row.name: row.after_bytes for row in rows},
        found.after.peak_bytes,
        plain={row.name: row.before_bytes for row in rows},
    )
