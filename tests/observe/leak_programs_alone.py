"""Leaks of many kinds are found, and named by holder and line; clean programs raise no alarm."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from memfit.observe.leaks import LeakFinder

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from leak_programs.clean import CLEAN
from leak_programs.planted import PLANTED
from leak_programs.training import text_of_line


def told_of(program) -> list:
    """Run a program with a finder of its own, and return what was told."""
    gc.collect()
    told = []
    finder = LeakFinder(told.append, overhead_fraction=1.0)
    program.run(finder)
    assert tuple(told) == finder.findings
    return told


@pytest.mark.parametrize("program", PLANTED, ids=lambda program: program.run.__name__)
def test_a_planted_leak_is_named(program) -> None:
    (event,) = told_of(program)
    assert event.kind == program.kind
    assert event.holder == program.holder or event.holder.endswith(f".{program.holder}")
    assert event.holder in event.sentence
    assert event.total_growth_bytes > 0
    assert not program.line or program.line in text_of_line(event.source_line)


@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program.run.__name__)
def test_a_clean_run_raises_no_alarm(program) -> None:
    assert told_of(program) == []
