"""How long tests take: `seconds.txt` names all that are not quick, each with its processor time.

What takes longer than `SLOW_SECONDS` is slow: only `make test-all` runs it. What is not in the list
is fast, and `make fast` runs nothing else. The list is written from a report of a run:

    make test-all ARGS=--junitxml=report.xml
    python tests/seconds.py report.xml

Tests that are in no report keep their place, and lose it when their function is gone.
"""

from __future__ import annotations

import argparse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
LIST = FOLDER / "seconds.txt"
LISTED_SECONDS = 0.1
SLOW_SECONDS = 0.7
PROPERTY = "processor_seconds"
"""What the report of a run calls it."""
COLLECTED = pytest.StashKey[frozenset[str]]()
"""The names of all tests of a run, before some are left out."""


def listed() -> dict[str, float]:
    """Read the seconds of each test that is not quick, by its name below this folder."""
    rows = (line.split(" ", 1) for line in LIST.read_text("utf-8").splitlines())
    return {name: float(seconds) for seconds, name in rows}


def fast(names: Iterable[str], seconds: Mapping[str, float]) -> set[str]:
    """Choose what is not in the list, and the quickest test of a file of which all are."""
    quickest: dict[str, str] = {}
    for name in names:
        file = name.partition("::")[0]
        quickest[file] = min(quickest.get(file, name), name, key=lambda each: seconds.get(each, 0))
    some = (name for name in quickest.values() if seconds.get(name, 0) <= SLOW_SECONDS)
    return {name for name in names if name not in seconds}.union(some)


def is_there(name: str) -> bool:
    """Return whether the function of a listed test exists."""
    file, _, function = name.partition("::")
    return f"def {function.partition('[')[0]}(" in _text(FOLDER / file)


@cache
def _text(file: Path) -> str:
    return file.read_text("utf-8") if file.is_file() else ""


def main() -> None:
    """Read reports and write the list."""
    parser = argparse.ArgumentParser(description="List the tests that are not quick.")
    parser.add_argument("reports", nargs="*", type=Path)
    seconds = {name: took for name, took in listed().items() if is_there(name)}
    for report in parser.parse_args().reports:
        seconds.update(_reported(report))
    slow = {name: took for name, took in seconds.items() if took >= LISTED_SECONDS}
    LIST.write_text("".join(f"{slow[name]:.1f} {name}\n" for name in sorted(slow)), "utf-8")


def _reported(report: Path) -> Iterator[tuple[str, float]]:
    """Yield each test as pytest names it, below this folder, and the seconds that it took."""
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
        for each in case.iter("property"):
            if each.attrib["name"] == PROPERTY:
                yield f"{file}.py::{case.attrib['name']}", float(each.attrib["value"])


if __name__ == "__main__":
    main()
