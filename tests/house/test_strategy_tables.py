"""The documents list what excludes what, and where strategies take hold, as the code has them."""

import pytest

from memfit.strategies import CATALOGUE
from memfit.strategies.plan import RULES

from .strategy_tables import PAGE, exclusions, seams, with_tables


def test_the_page_has_the_tables_of_the_code() -> None:
    page = PAGE.read_text("utf-8")

    assert page == with_tables(page), "run: python tests/house/strategy_tables.py"


def test_the_table_has_one_row_for_each_rule() -> None:
    rows = exclusions().splitlines()[2:]

    assert len(rows) == len(RULES)
    for rule in RULES:
        assert any(f"(#{rule.first})" in row and f"(#{rule.second})" in row for row in rows)
        assert any(rule.reason in row for row in rows)


def test_every_strategy_says_where_it_takes_hold() -> None:
    rows = seams().splitlines()[2:]

    assert len(rows) == len(CATALOGUE)
    assert all("x" in row.rpartition(")")[2] for row in rows)


def test_a_table_that_was_changed_by_hand_is_found() -> None:
    page = PAGE.read_text("utf-8")
    edited = page.replace(RULES[0].reason, "nobody knows")

    assert edited != page
    assert with_tables(edited) == page


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="substring not found"):
        with_tables("# A page\n")
