"""One step on several devices: the order of the rows, the table and the page."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.zoo.predictions import make_prediction
from tests.zoo.terminal import rendered

from memfit.figures import Certainty, Interval
from memfit.prediction.compared_cards import ComparedCard, best_first
from memfit.prediction.largest_batch import LargestBatch
from memfit.reports.cards_html import cards_html
from memfit.reports.cards_text import cards_table
from memfit.reports.charts.frontier_chart import cards_chart
from memfit.units import GIB

NEEDED = 10 * GIB


def card(
    name: str, memory_gib: int, seconds: float, batch: LargestBatch | None = None
) -> ComparedCard:
    prediction = make_prediction(
        NEEDED,
        device=name,
        process_bytes=NEEDED,
        step_seconds=seconds,
        budget_bytes=memory_gib * GIB,
        budget_of="process",
        fits=memory_gib * GIB >= NEEDED,
        certainty=Certainty.TABLE,
        intervals={"process": Interval(low_bytes=NEEDED - GIB, high_bytes=NEEDED + GIB)},
        terms=(),
    )
    return ComparedCard(
        prediction=prediction,
        title=f"{name} <b>",
        memory_bytes=memory_gib * GIB,
        seconds_certainty=Certainty.GUESS,
        recorded_for=name,
        needed_bytes=NEEDED,
        largest_batch=batch,
    )


SLOW, FAST = card("slow", 24, 2.0), card("fast", 80, 0.5)
SMALL, TINY = card("small", 8, 0.1), card("tiny", 4, 0.2)
TIGHT = card("tight", 10, 1.0)


def test_where_it_fits_comes_first_the_fastest_before_then_what_lacks_least() -> None:
    found = best_first([TINY, SLOW, SMALL, TIGHT, FAST])

    assert [each.prediction.device for each in found] == ["fast", "tight", "slow", "small", "tiny"]


def test_few_devices_are_named_and_many_counted() -> None:
    few = rendered(cards_table(best_first([FAST, TIGHT, SMALL]), job="job.py:job"))
    assert few.startswith("Fits fast. Uncertain on tight. Does not fit small.")
    assert "2.00 GiB over" in few
    assert "~500 ms" in few

    many = [replace(FAST, prediction=replace(FAST.prediction, device=f"d{n}")) for n in range(40)]
    shown = rendered(cards_table([*many, SMALL], job="job.py:job"))
    assert shown.startswith("Fits 40 of 41 devices. Fastest: d0. Least memory: d0.")
    assert "and 11 more" in shown
    assert "small" not in shown
    assert "small" in rendered(cards_table([*many, SMALL], job="job.py:job", in_full=True))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (LargestBatch(batch_size=1234), "1,234"),
        (LargestBatch(batch_size=32, is_most=False), "32+"),
        (
            LargestBatch(batch_size=None, reason="batch normalisation."),
            "fast: batch normalisation.",
        ),
    ],
)
def test_the_largest_batch_has_a_column(batch: LargestBatch, expected: str) -> None:
    found = replace(FAST, largest_batch=batch)

    assert expected in " ".join(rendered(cards_table([found, SLOW], job="job.py:job")).split())


def test_what_failed_and_what_was_left_out_is_told() -> None:
    shown = rendered(
        cards_table([FAST], job="job.py:job", failures={"t4": "it has no bf16"}, num_left_out=3)
    )

    assert "t4: it has no bf16" in shown
    assert "the last 3" in shown


def test_no_line_is_wider_than_the_terminal() -> None:
    long = card("x" * 40, 24, 1.0, LargestBatch(batch_size=123456))
    for line in rendered(cards_table([long, SMALL], job="job.py:job")).splitlines():
        assert len(line) <= 80


def test_the_page_has_a_row_and_a_point_for_each_device() -> None:
    pytest.importorskip("jinja2")
    cards = best_first([FAST, SLOW, SMALL])
    page = cards_html(cards, job="job.py:job", failures={"t4": "no <i>"})

    for part in (
        "2.00 GiB over",
        "fast &lt;b&gt;",
        "no &lt;i&gt;",
        'id="plan-2"',
        "9.00 to 11.00 GiB",
    ):
        assert part in page
    chart = cards_chart(cards)
    assert chart is not None
    assert [point["kind"] for point in chart["points"]] == ["yes", "yes", "no"]
    assert [point["bytes"] for point in chart["points"]] == [80 * GIB, 24 * GIB, 8 * GIB]
    assert chart["mark"]["bytes"] == NEEDED
    many = [card(f"d{n}", 20, 1.0 + n) for n in range(30)]
    crowded = cards_chart([FAST, *many, SMALL])
    assert crowded is not None
    assert [point["label"] for point in crowded["points"] if point["label"]] == ["fast", "d0"]
    assert cards_chart([FAST]) is None
    assert "data-chart" not in cards_html([FAST], job="j").partition("<script")[0]
