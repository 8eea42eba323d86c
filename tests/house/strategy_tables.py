"""Writes the tables of docs/strategies.md that follow from the code: what excludes what, and seams.

Run: python tests/house/strategy_tables.py
"""

from __future__ import annotations

from pathlib import Path

from memfit.files import write_atomically
from memfit.strategies import CATALOGUE
from memfit.strategies.base import Seam
from memfit.strategies.plan import RULES

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
_BEGIN = "<!-- {}: written by tests/house/strategy_tables.py; do not edit. -->"
_END = "<!-- Until here. -->"


def exclusions() -> str:
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


def seams() -> str:
    """Write where each strategy takes hold as a table."""
    lines = [f"| strategy | {' | '.join(Seam)} |", f"|---|{'---|' * len(Seam)}"]
    for strategy in CATALOGUE:
        marks = ("x" if seam in strategy.seams else "" for seam in Seam)
        lines.append(f"| {_link(strategy.name)} | {' | '.join(marks)} |")
    return "\n".join(lines)


TABLES = {"exclusions": exclusions, "seams": seams}


def with_tables(page: str) -> str:
    """Put the tables between their marks on a page.

    Raises:
        ValueError: if a mark is missing.
    """
    for name, table in TABLES.items():
        begin = _BEGIN.format(name)
        before = page.index(begin)
        after = page.index(_END, before)
        page = f"{page[:before]}{begin}\n\n{table()}\n\n{page[after:]}"
    return page


def _link(name: str) -> str:
    return f"[{name}](#{name})"


if __name__ == "__main__":
    write_atomically(PAGE, with_tables(PAGE.read_text("utf-8")))
