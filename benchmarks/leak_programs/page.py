"""Writes what was measured into docs/leaks.md, between its marks.

Run: python benchmarks/leak_programs/page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from memfit.files import write_atomically
from memfit.units import format_seconds

_ROOT = Path(__file__).parents[2]
PAGE = _ROOT / "docs" / "leaks.md"
RESULT = _ROOT / "benchmarks" / "results" / "leaks.json"
BEGIN = "<!-- Written by benchmarks/leak_programs/page.py; do not edit. -->"
END = "<!-- Until here. -->"


def table(figures: dict[str, Any]) -> str:
    """Write the figures as text and a table."""
    low, _, high = figures["quartiles_of_ratio"]
    setting = (
        f"`python benchmarks/bench_leaks.py`, {figures['date']}, torch {figures['torch']}, CPU, "
        f"{figures['num_threads']} thread, the finder as it comes:"
    )
    found = (
        f"- {figures['num_planted']} planted leaks: {figures['num_holders_named']} holders and "
        f"{figures['num_lines_named']} of {figures['num_lines_wanted']} lines named rightly."
    )
    overhead = (
        f"- A step of {format_seconds(figures['bare_step_seconds'])} takes "
        f"{figures['median_ratio']:.3f} times as long with `boundary` (quartiles {low:.2f} to "
        f"{high:.2f}, blocks in turns). The calls took {figures['spent_seconds']:.2f} s of "
        f"{figures['run_seconds']:.0f} s; the budget was {figures['budget_seconds']:.2f} s. One at "
        f"which nothing is due takes {format_seconds(figures['boundary_seconds'])}."
    )
    clean = f"- {figures['num_clean']} clean runs: {figures['num_alarms']} alarms."
    head = ["| planted | kind | found after | holder | line |", "|---|---|---:|---|---|"]
    lines = [setting, "", found, clean, overhead, "", *head]
    for row in figures["rows"]:
        after = f"{row['found_after_steps']} steps" if row["found_after_steps"] else "not found"
        line = "named" if row["is_line_named"] else "no"
        holder = f"`{row['holder']}`" if row["is_holder_named"] else "no"
        lines.append(f"| {row['name']} | `{row['kind']}` | {after} | {holder} | {line} |")
    return "\n".join(lines)


def with_table(page: str, figures: dict[str, Any]) -> str:
    """Put the table between its marks on a page.

    Raises:
        ValueError: if a mark is missing.
    """
    before, after = page.index(BEGIN), page.index(END)
    return f"{page[:before]}{BEGIN}\n\n{table(figures)}\n\n{page[after:]}"


def main() -> None:
    """Write the page."""
    figures = json.loads(RESULT.read_text("utf-8"))
    write_atomically(PAGE, with_table(PAGE.read_text("utf-8"), figures))


if __name__ == "__main__":
    main()
