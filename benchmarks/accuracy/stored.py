"""Reads scored rows back from the stored results, so that a few can be scored anew beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memfit.figures import Interval
from memfit.prediction.peak_range import PeakRange

from .metrics import Figure, Score, Verdict
from .rows import Row
from .scoring import Predicted

_VERDICT_FIELDS = ("kind", "limit_bytes", "says_fits", "fits", "is_uncertain")


def stored_scores(content: Mapping[str, Any], rows: Mapping[str, Row]) -> Iterator[Score]:
    """Yield the scores of stored rows that there still are, with the figures that were stored.

    Args:
        content: of benchmarks/results/accuracy_gpu.json, or what ``--json-out`` has written.
        rows: all rows by their names.
    """
    for stored in content["rows"]:
        row = rows.get(stored["id"])
        if row is not None:
            yield _score(row, stored)


def _score(row: Row, stored: Mapping[str, Any]) -> Score:
    if stored["failure"] is not None:
        return Score(row=row, failure=stored["failure"])
    figures = {name: _figure(each) for name, each in stored["figures"].items()}
    ranges = {
        name: PeakRange(
            likely_bytes=figures[name].predicted_bytes,
            low_bytes=figures[name].interval.low_bytes,
            high_bytes=figures[name].interval.high_bytes,
        )
        for name in ("allocated", "reserved")
    }
    return Score(
        row=row,
        predicted=Predicted(
            device=stored["catalogue_device"],
            smallest_bytes=stored["smallest_bytes"],
            context_bytes=stored["context_bytes"],
            card_bytes=0,
            seconds=stored["seconds"],
            notes=tuple(stored["notes"]),
            **ranges,
        ),
        context_bytes=stored["context_bytes"],
        context_rows=stored["context_rows"],
        figures=figures,
        verdicts=tuple(
            Verdict(**{name: each[name] for name in _VERDICT_FIELDS}) for each in stored["verdicts"]
        ),
    )


def _figure(stored: Mapping[str, Any]) -> Figure:
    return Figure(
        predicted_bytes=stored["predicted_bytes"],
        interval=Interval(low_bytes=stored["low_bytes"], high_bytes=stored["high_bytes"]),
        measured_bytes=stored["measured_bytes"],
        peak=PeakRange(**stored["peak"]) if stored.get("peak") else None,
    )
