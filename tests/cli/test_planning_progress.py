"""What is seen while planning goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.cli.planning_progress import PlanningProgress
from memfit.figures import EarlierPlan, PlanSoFar

FOUND = PlanSoFar(
    strategies=("fused-attention", "micro-batching(4)"),
    peak_bytes=3 << 30,
    step_seconds=0.3,
    plain_step_seconds=0.25,
    num_recorded=5,
    num_left=7,
    elapsed_seconds=4.0,
)


def test_where_nobody_watches_each_better_plan_is_a_line():
    lines: list[str] = []
    progress = PlanningProgress(None, lines.append)
    progress.recording("as it is")
    progress.better(FOUND)
    (line,) = lines
    assert line == (
        "memfit: after 4 s a plan that fits in 3.00 GiB, 300 ms a step, 1.20 x plain; "
        "7 may be faster: fused-attention + micro-batching(4)\n"
    )


@pytest.mark.parametrize("width", [10, 60, 80])
def test_where_somebody_watches_all_is_one_line_of_the_width(width):
    shown: list[str] = []
    progress = PlanningProgress(
        shown.append, lambda _line: pytest.fail("one line is enough"), width
    )
    progress.better(FOUND)
    progress.recording("micro-batching(4) + " * 20)
    assert shown[0].startswith("fits: 3.00 GiB, 300 ms a step, 1.20 x plain · 1: micro-")
    assert len(shown[0]) <= max(width, 70)


def test_brackets_of_labels_are_no_markup():
    shown: list[str] = []
    PlanningProgress(shown.append, lambda _line: None, 80).recording("activation[red]")
    assert r"\[red]" in shown[0]


def test_what_is_slower_than_a_plan_that_is_known_is_not_told():
    lines: list[str] = []
    progress = PlanningProgress(None, lines.append)
    progress.known(EarlierPlan(strategies=("tiling(4)",), peak_bytes=2 << 30, step_seconds=0.29))
    assert lines == [
        "memfit: an earlier call has found a plan that fits in 2.00 GiB, 290 ms a step: tiling(4)\n"
    ]
    progress.better(FOUND)
    assert len(lines) == 1
    progress.better(replace(FOUND, step_seconds=0.28))
    assert "280 ms" in lines[1]


def test_somebody_who_watches_sees_the_plan_that_is_known():
    shown: list[str] = []
    progress = PlanningProgress(shown.append, lambda _line: pytest.fail("one line is enough"))
    progress.known(EarlierPlan(strategies=(), peak_bytes=2 << 30, step_seconds=0.29))
    progress.recording("as it is")
    assert shown[0] == "known to fit: 2.00 GiB, 290 ms a step"
    assert shown[1] == "known to fit: 2.00 GiB, 290 ms a step · 1: as it is"
