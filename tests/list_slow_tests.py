"""Write `slow_tests.txt`, which says what only `make test-all` runs, from how long tests took.

    make test-all ARGS=--junitxml=report.xml
    python tests/list_slow_tests.py report.xml

Tests that a report does not name keep their place in the list.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

LIST = Path(__file__).with_name("slow_tests.txt")
SLOW_SECONDS = 0.7
"""On a free core; all that is quicker takes four minutes on two."""


def main() -> None:
    """Read reports and write the list."""
    parser = argparse.ArgumentParser(description="List the slow tests.")
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--above", type=float, default=SLOW_SECONDS, help="seconds")
    arguments = parser.parse_args()
    before = set(LIST.read_text("utf-8").splitlines()) if LIST.exists() else set()
    seconds: dict[str, float] = {}
    for report in arguments.reports:
        seconds.update(_seconds(report))
    slow = {name for name, took in seconds.items() if took > arguments.above}
    listed = sorted(slow | (before - seconds.keys()))
    LIST.write_text("".join(f"{name}\n" for name in listed), "utf-8")


def _seconds(report: Path) -> Iterator[tuple[str, float]]:
    """Yield each test as pytest names it, below this folder, and the seconds that it took."""
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
        yield f"{file}.py::{case.attrib['name']}", float(case.attrib["time"])


if __name__ == "__main__":
    main()
