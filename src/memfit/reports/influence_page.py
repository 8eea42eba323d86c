"""The page of influence scans: what helped and what harmed each test sample, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .page import page_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluenceRow:
    """One training sample."""

    name: str
    shared: str
    """What it has in common with the test sample, in words."""
    score: float
    line: int
    """Where it stands among the training samples, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluenceTable:
    """Training samples of one kind, the most extreme one first."""

    heading: str
    rows: Sequence[InfluenceRow]
    empty: str
    """What is said where there is none."""
    tone: str
    """``planned`` or ``over``: the colour of the bars."""
    shared: str = "In common"
    """The heading of what they have in common; empty leaves the column out."""

    def widths(self) -> list[float]:
        """Return the bars, in percent of the widest."""
        widest = max((abs(row.score) for row in self.rows), default=0.0) or 1.0
        return [round(100 * abs(row.score) / widest, 2) for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluenceSubject:
    """One test sample with its tables."""

    name: str
    kind: str
    tables: Sequence[InfluenceTable]


@dataclass(frozen=True, slots=True, kw_only=True)
class InfluencePage:
    """What the page shows."""

    title: str
    facts: Sequence[tuple[str, str]]
    reading: Sequence[str]
    """How to read it, a sentence each."""
    subjects: Sequence[InfluenceSubject]
    footer: str


def check_can_render() -> None:
    """See that a page can be made.

    Raises:
        MissingExtraError: if jinja2 is not installed.
    """
    page_environment()


def influence_html(page: InfluencePage) -> str:
    """Render a self-contained page.

    Raises:
        MissingExtraError: if jinja2 is not installed.
    """
    return page_environment().get_template("influence.html.j2").render(page=page)
