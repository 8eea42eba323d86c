"""How long tests take: `seconds.txt` names all that are not quick, with their processor time.

What takes longer than `SLOW_SECONDS` is slow: only `make test-all` runs it. What is not in the list
is fast, and `make fast` runs little else. A function that is named without a case stands for all
its cases that are not named themselves. `file.py@name` is a fixture: what needs it takes that long
where it is the first to, so it is not fast, though not slow for that. The list is written from a report of a run:

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
from typing import Any

import pytest

FOLDER = Path(__file__).parent
LIST = FOLDER / "seconds.txt"
LISTED_SECONDS = 0.05
CASE_SECONDS = 0.1
"""A case that takes longer is named by itself, and does not count in its function's mean."""
SLOW_SECONDS = 0.2
PROPERTY = "processor_seconds"
"""What the report of a run calls it."""
FIXTURE_PROPERTY = "fixture_seconds"
"""The same of a fixture that was made for a test, with its name behind it."""
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


def name_of(fixture: pytest.FixtureDef[Any]) -> str:
    """Return what the list calls a fixture of these tests; nothing for those of plugins."""
    place = fixture.baseid.partition("::")[0]
    if place != "tests" and not place.startswith("tests/"):
        return ""
    file = place if place.endswith(".py") else f"{place}/conftest.py"
    return f"{file.removeprefix('tests/')}@{fixture.argname}"


def fixtures_of(item: pytest.Item) -> list[str]:
    """Name the fixtures that a test needs."""
    found = getattr(item, "_fixtureinfo", None)
    definitions = found.name2fixturedefs.values() if found else ()
    return [name for each in definitions if (name := name_of(each[-1]))]


def fast(tests: Mapping[str, Iterable[str]], seconds: Mapping[str, float]) -> set[str]:
    """Choose what is not in the list, and the quickest test of a file of which all are.

    Args:
        tests: with the fixtures that each needs.
        seconds: of the list.
    """
    took = {
        name: seconds_of(name, seconds) + sum(seconds.get(each, 0.0) for each in fixtures)
        for name, fixtures in tests.items()
    }
    quickest: dict[str, str] = {}
    for name in took:
        file = name.partition("::")[0]
        quickest[file] = min(quickest.get(file, name), name, key=took.__getitem__)
    return {name for name in took if not took[name]} | {
        name for name in quickest.values() if took[name] <= SLOW_SECONDS
    }


def updated(before: Mapping[str, float], reported: Mapping[str, float]) -> dict[str, float]:
    """Put what was reported in the place of what the list had: long cases, and the rest's mean."""
    functions = {function_of(name) for name in reported}
    found = {name: took for name, took in before.items() if function_of(name) not in functions}
    cases: dict[str, dict[str, float]] = {each: {} for each in functions}
    kept = {name: took for name, took in before.items() if "[" in name}
    for name, took in {**kept, **reported}.items():
        if function_of(name) in cases:
            cases[function_of(name)][name] = took
    for function, each in cases.items():
        named, found[function] = _split(each)
        found |= named
    return {name: took for name, took in found.items() if took >= LISTED_SECONDS}


def _split(cases: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Single out the slow cases of a function and then the long ones, and average the rest."""
    named: dict[str, float] = {}
    for most_seconds in (SLOW_SECONDS, CASE_SECONDS):
        longer = {name: took for name, took in cases.items() if took > most_seconds}
        if len(longer) < len(cases):
            named |= longer
            cases = {name: took for name, took in cases.items() if name not in longer}
    return named, fmean(cases.values())


def is_there(name: str) -> bool:
    """Return whether the function of a listed test exists."""
    file, _, function = name.replace("@", "::").partition("::")
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
            elif each.attrib["name"] == FIXTURE_PROPERTY:
                took, name = each.attrib["value"].split(" ", 1)
                yield name, float(took)


if __name__ == "__main__":
    main()
