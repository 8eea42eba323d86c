"""Whether intervals hold on a source that has not set their margins.

A margin is set from rows, so those rows say nothing of whether it holds. The margins of one card
are set from steps whose program is known, none of which is in the collection. Of several ranks
each source is left out in turn: a margin comes from the others, and is held against its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.prediction.peak_range import PeakRange

from .metrics import QUANTITIES, percentile

Content = Mapping[str, Any]
_BEYOND = 1.5
"""How much wider a margin is than 19 of 20 rows of the source that needs most."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A source that was left out when margins were set."""

    source: str
    quantity: str
    margin: float | None
    """Of several ranks, as the other sources set it, never wider than the one in force; None where
    all rows are of one card."""
    num_inside: int
    num_rows: int


def left_out(rows: Sequence[Content]) -> Iterator[LeftOut]:
    """Yield each source and quantity of the collection, held against margins of the others."""
    read = [
        (row, name, figure)
        for row in rows
        for name, figure in (row.get("figures") or {}).items()
        if row["is_collected"] and figure["measured_bytes"] and figure.get("peak")
    ]
    for source in dict.fromkeys(row["source"] for row, _, _ in read):
        for quantity in QUANTITIES:
            own = [(r, f) for r, name, f in read if (r["source"], name) == (source, quantity)]
            others = [
                (row["source"], _needed_margin(figure))
                for row, name, figure in read
                if row["source"] != source and row["ranks"] > 1
                if (name == "allocated") == (quantity == "allocated")
            ]
            margin = min(_margin(others), _in_force(quantity))
            inside = sum(_is_inside(row, figure, margin) for row, figure in own)
            is_shared = any(row["ranks"] > 1 for row, _ in own)
            if own:
                yield LeftOut(source, quantity, margin if is_shared else None, inside, len(own))


def _is_inside(row: Content, figure: Content, margin: float) -> bool:
    if row["ranks"] > 1:
        return _needed_margin(figure) <= margin
    return bool(figure["low_bytes"] <= figure["measured_bytes"] <= figure["high_bytes"])


def _margin(needed: Sequence[tuple[str, float]]) -> float:
    """Return the margin that rows of several sources set."""
    by_source: dict[str, list[float]] = {}
    for source, need in needed:
        by_source.setdefault(source, []).append(need)
    return _BEYOND * max((percentile(each, 0.95) for each in by_source.values()), default=0.0)


def _in_force(quantity: str) -> float:
    num_bytes = 10**6
    peak = PeakRange(
        likely_bytes=num_bytes, low_bytes=num_bytes, high_bytes=num_bytes, is_shared=True
    )
    return peak.interval(quantity).high_bytes / num_bytes - 1


def _needed_margin(figure: Content) -> float:
    """Return the margin with which an interval just reaches a reading."""
    peak = PeakRange(**figure["peak"])
    off = figure["measured_bytes"] - peak.likely_bytes
    end = peak.high_bytes if off > 0 else peak.low_bytes
    beyond = off**2 - (end - peak.likely_bytes) ** 2 - peak.doubt_bytes**2
    return math.sqrt(max(0, beyond)) / peak.likely_bytes
