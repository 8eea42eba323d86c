"""Runs without a leak raise no alarm, however much in them grows for a while."""

import pytest

from memfit.runtime.leaks import LeakFinder

from .leak_programs import load

CLEAN = load("clean").CLEAN


@pytest.mark.parametrize("overhead_fraction", [0.005, 1.0])
@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program.run.__name__)
def test_a_clean_run_raises_no_alarm(program, overhead_fraction: float) -> None:
    finder = LeakFinder(overhead_fraction=overhead_fraction)

    program.run(finder)

    assert finder.findings == ()


def test_there_are_at_least_twenty_two_clean_programs() -> None:
    assert len({program.run for program in CLEAN}) >= 22
