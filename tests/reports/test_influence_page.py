"""The page of influence scans: names as they are, bars in proportion, nothing from outside."""

import re

import pytest

from memfit.reports.influence_page import (
    InfluencePage,
    InfluenceRow,
    InfluenceSubject,
    InfluenceTable,
    influence_html,
)

pytest.importorskip("jinja2", reason="pages need the html extra")


def page(*rows: InfluenceRow, shared: str = "In common") -> str:
    table = InfluenceTable(
        heading="In favour", rows=rows, empty="None was in favour.", tone="planned", shared=shared
    )
    subject = InfluenceSubject(name="a <b> c", kind="test line 1", tables=[table])
    return influence_html(
        InfluencePage(
            title="What was learned",
            facts=[("Training triples", "12")],
            reading=["Read it so."],
            subjects=[subject],
            footer="Until here.",
        )
    )


def test_names_are_shown_as_they_are_and_bars_are_in_proportion() -> None:
    rows = [
        InfluenceRow(name="x → <y>", shared="relation", score=-4.0, line=3),
        InfluenceRow(name="z", shared="", score=-1.0, line=1200),
    ]
    text = page(*rows)

    assert "a &lt;b&gt; c" in text
    assert "x → &lt;y&gt;" in text
    assert re.findall(r'<i style="width: ([\d.]+)%', text) == ["100.0", "25.0"]
    assert re.findall(r"-\d\b", text.partition("</header>")[2])[-2:] == ["-4", "-1"]
    assert "1,200" in text
    assert "http" not in text.partition("<body>")[2]


def test_an_empty_table_says_so() -> None:
    assert "None was in favour." in page()


def test_a_column_that_says_nothing_is_left_out() -> None:
    row = InfluenceRow(name="x", shared="", score=1.0, line=1)

    assert "In common" in page(row)
    assert "In common" not in page(row, shared="")
