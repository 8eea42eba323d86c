"""The documents list the strategies that exclude each other as the planner's table has them."""

import pytest

from memfit.strategies.compatibility import RULES

from .compatibility_table import PAGE, table, with_table


def test_the_page_has_the_table_of_the_planner() -> None:
    page = PAGE.read_text("utf-8")

    assert page == with_table(page), "run: python tests/house/compatibility_table.py"


def test_the_table_has_one_row_for_each_rule() -> None:
    rows = table().splitlines()[2:]

    assert len(rows) == len(RULES)
    for rule in RULES:
        assert any(f"(#{rule.first})" in row and f"(#{rule.second})" in row for row in rows)
        assert any(rule.reason in row for row in rows)


def test_a_table_that_was_changed_by_hand_is_found() -> None:
    page = PAGE.read_text("utf-8")
    edited = page.replace(RULES[0].reason, "nobody knows")

    assert edited != page
    assert with_table(edited) == page


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="substring not found"):
        with_table("# A page\n")
