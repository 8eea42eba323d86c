"""How long tests take: `seconds.txt` names all that are not quick, with their processor time.

What takes longer than `SLOW_SECONDS` is slow: only `make test-all` runs it. What is not in the list
is fast, and `make fast` runs little else. A function that is named without a case stands for all
its cases that are not named themselves. The list is written from a report of a run:

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
from statistics import fmean

import pytest

FOLDER = Path(__file__).parent
LIST = FOLDER / "seconds.txt"
LISTED_SECONDS = 0.05
SLOW_SECONDS = 0.7
PROPERTY = "processor_seconds"
"""What the report of a run calls it."""
COLLECTED = pytest.StashKey[frozenset[str]]()
"""The names of all tests of a run, before some are left out."""


def listed() -> dict[str, float]:
    """Read the seconds of each test that is not quick, by its name below this folder."""
    rows = (line.split(" ", 1) for line in LIST.read_text("utf-8").splitlines())
    return {name: float(seconds) for seconds, name in rows}


def seconds_of(name: str, seconds: Mapping[str, float]) -> float:
    """Return what the list has of a test or of its function; 0 if it has neither."""
    return seconds.get(name, seconds.get(function_of(name), 0.0))


def function_of(name: str) -> str:
    """Return the name of a test without its case."""
    return name.partition("[")[0]


def fast(names: Iterable[str], seconds: Mapping[str, float]) -> set[str]:
    """Choose what is not in the list, and the quickest test of a file of which all are."""
    took = {name: seconds_of(name, seconds) for name in names}
    quickest: dict[str, str] = {}
    for name in took:
        file = name.partition("::")[0]
        quickest[file] = min(quickest.get(file, name), name, key=took.__getitem__)
    return {name for name in took if not took[name]} | {
        name for name in quickest.values() if took[name] <= SLOW_SECONDS
    }


def updated(before: Mapping[str, float], reported: Mapping[str, float]) -> dict[str, float]:
    """Put what was reported in the place of what the list had: slow cases, and the rest's mean."""
    functions = {function_of(name) for name in reported}
    found = {name: took for name, took in before.items() if function_of(name) not in functions}
    cases: dict[str, dict[str, float]] = {each: {} for each in functions}
    kept = {name: took for name, took in before.items() if "[" in name}
    for name, took in {**kept, **reported}.items():
        if function_of(name) in cases:
            cases[function_of(name)][name] = took
    for function, each in cases.items():
        slow = {name: took for name, took in each.items() if took > SLOW_SECONDS}
        if len(slow) < len(each):
            found |= slow
        rest = [took for name, took in each.items() if name not in slow] or list(slow.values())
        found[function] = fmean(rest)
    return {name: took for name, took in found.items() if took >= LISTED_SECONDS}


def is_there(name: str) -> bool:
    """Return whether the function of a listed test exists."""
    file, _, function = name.partition("::")
    return f"def {function_of(function)}(" in _text(FOLDER / file)


@cache
def _text(file: Path) -> str:
    return file.read_text("utf-8") if file.is_file() else ""


def main() -> None:
    """Read reports and write the list."""
    parser = argparse.ArgumentParser(description="List the tests that are not quick.")
    parser.add_argument("reports", nargs="*", type=Path)
    before = {name: took for name, took in listed().items() if is_there(name)}
    reports = parser.parse_args().reports
    reported = {name: took for report in reports for name, took in _reported(report)}
    write(updated(before, reported))


def write(seconds: Mapping[str, float]) -> None:
    """Write the list."""
    lines = (f"{seconds[name]:.2f} {name}\n" for name in sorted(seconds))
    LIST.write_text("".join(lines), "utf-8")


def _reported(report: Path) -> Iterator[tuple[str, float]]:
    """Yield each test as pytest names it, below this folder, and the seconds that it took."""
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].removeprefix("tests.").replace(".", "/")
        for each in case.iter("property"):
            if each.attrib["name"] == PROPERTY:
                yield f"{file}.py::{case.attrib['name']}", float(each.attrib["value"])


if __name__ == "__main__":
    main()
