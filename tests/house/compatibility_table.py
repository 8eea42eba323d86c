"""Writes which strategies exclude each other into docs/strategies.md, from the planner's table.

Run: python tests/house/compatibility_table.py
"""

from __future__ import annotations

from pathlib import Path

from memfit.files import write_atomically
from memfit.strategies import CATALOGUE
from memfit.strategies.compatibility import RULES

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
BEGIN = "<!-- Written by tests/house/compatibility_table.py; do not edit. -->"
END = "<!-- Until here. -->"


def table() -> str:
    """Write the rules as a table, in the order in which strategies are shown."""
    order = {strategy.name: place for place, strategy in enumerate(CATALOGUE)}
    lines = ["| strategy | not with | because |", "|---|---|---|"]
    rows = []
    for rule in RULES:
        first, second = sorted((rule.first, rule.second), key=order.__getitem__)
        rows.append((order[first], order[second], first, second, rule.reason))
    lines += [
        f"| {_link(first)} | {_link(second)} | {why} |" for *_, first, second, why in sorted(rows)
    ]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """Put the table between its marks on a page.

    Raises:
        ValueError: if a mark is missing.
    """
    before, after = page.index(BEGIN), page.index(END)
    return f"{page[:before]}{BEGIN}\n\n{table()}\n\n{page[after:]}"


def _link(name: str) -> str:
    return f"[{name}](#{name})"


if __name__ == "__main__":
    write_atomically(PAGE, with_table(PAGE.read_text("utf-8")))
