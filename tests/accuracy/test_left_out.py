"""Margins that some sources set are held against the rows of another."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from accuracy.left_out import LeftOut, left_out

from memfit.prediction.peak_range import PeakRange


def row(source, measured, *, ranks=2, quantity="reserved", is_collected=True, **ends):
    peak = PeakRange(**({"likely_bytes": 1000, "low_bytes": 1000, "high_bytes": 1000} | ends))
    interval = peak.interval(quantity)
    figure = {
        "measured_bytes": measured,
        "low_bytes": interval.low_bytes,
        "high_bytes": interval.high_bytes,
        "peak": asdict(peak),
    }
    return {
        "source": source,
        "ranks": ranks,
        "is_collected": is_collected,
        "figures": {quantity: figure},
    }


def test_margins_of_ranks_come_from_the_other_sources():
    rows = [row("far", 1100), row("near", 1020), row("near", 1040, quantity="process")]
    far, near_reserved, near_process = left_out(rows)
    assert far == LeftOut("far", "reserved", pytest.approx(1.5 * 0.039), 0, 1)
    assert near_reserved == LeftOut("near", "reserved", pytest.approx(0.15), 1, 1)
    assert near_process == LeftOut("near", "process", pytest.approx(0.15), 1, 1)


def test_what_replays_span_needs_no_margin():
    rows = [row("one", 1300, high_bytes=1300), row("other", 1000), row("other", 999)]
    assert [each.num_inside for each in left_out(rows)] == [1, 1]


def test_margins_of_one_card_are_those_in_force():
    rows = [row("one", 1040, ranks=1), row("one", 1050, ranks=1), row("other", 1000)]
    assert next(iter(left_out(rows))) == LeftOut("one", "reserved", None, 1, 2)


def test_rows_outside_the_collection_are_not_held():
    assert [*left_out([row("own", 1000, is_collected=False)])] == []
