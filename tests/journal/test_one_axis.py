"""A measured step lies on the predicted one where they are equal, whatever else it has."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.figures import Timeline
from memfit.journal.one_axis import laid_along
from memfit.journal.timeline import StepTimeline, read_timeline, write_timeline

MIB = 2**20


def timeline(totals: list[int], phases: list[tuple[int, str]] | None = None) -> Timeline:
    return Timeline(
        allocated_bytes=totals, by_category={"batch": totals}, phases=phases or [(0, "forward")]
    )


def at(found: Timeline, place: int) -> int:
    """Return the bytes at a place of the axis."""
    return found.allocated_bytes[bisect_right(found.axis(), place) - 1]


def a_step(num_events: int) -> list[int]:
    """Make the totals of a step that rises and falls by amounts of its own."""
    generator = random.Random(3)
    changes = [generator.randrange(1, 90) * MIB + index for index in range(num_events // 2)]
    return list(accumulate([7 * MIB, *changes, *(-change for change in reversed(changes))]))


def with_scratch(totals: list[int], every: int) -> list[int]:
    """Add a few bytes that come and go, as a measured step has them."""
    found = []
    for place, total in enumerate(totals):
        found.append(total)
        if place % every == 0:
            found += [total + 8, total + 12, total]
    return found


def test_scratch_that_one_side_alone_has_does_not_push_the_other_one_along() -> None:
    totals = a_step(600)
    predicted, measured = timeline(totals), timeline(with_scratch(totals, 7))
    laid = laid_along(measured, predicted)
    gaps = [abs(at(laid, place) - total) for place, total in enumerate(totals)]
    assert max(gaps) <= 12
    assert laid.axis()[-1] == predicted.axis()[-1]
    # Counted one by one the same two are far apart.
    plain = [abs(at(measured, place) - total) for place, total in enumerate(totals)]
    assert max(plain) > 90 * MIB


def test_equal_steps_have_equal_places() -> None:
    totals = a_step(50)
    laid = laid_along(timeline(list(totals)), timeline(totals))
    assert list(laid.axis()) == list(range(len(totals)))


def test_steps_without_a_total_in_common_are_laid_beside_each_other_by_phase() -> None:
    short = timeline([1, 3, 5, 7], [(0, "forward"), (2, "backward")])
    long = timeline([0, 2, 4, 6, 8, 10, 12, 14], [(0, "forward"), (6, "backward")])
    assert laid_along(long, short).places == [0, 0.33, 0.67, 1, 1.33, 1.67, 2, 3]
    assert laid_along(short, long).places == [0, 3, 6, 7]


def test_an_empty_side_changes_nothing() -> None:
    empty, other = timeline([]), timeline([1, 2])
    assert laid_along(empty, other) is empty
    assert laid_along(other, empty) is other


def test_what_has_places_keeps_them() -> None:
    thinned = replace(timeline([1, 2]), places=(0, 9))
    assert laid_along(thinned, timeline([1, 3])) is thinned


TOTALS = st.lists(st.integers(0, 6), min_size=1, max_size=30)


@given(TOTALS, TOTALS)
@settings(max_examples=40)
def test_the_order_of_events_is_kept_and_none_is_lost(one: list[int], other: list[int]) -> None:
    axis = laid_along(timeline(one), timeline(other)).axis()
    assert len(axis) == len(one)
    assert list(axis) == sorted(axis)
    assert axis[0] >= 0
    assert axis[-1] <= max(len(one), len(other))


def test_a_long_step_of_a_run_keeps_its_axis_in_the_file(tmp_path: Path) -> None:
    totals = a_step(12_000)
    measured = with_scratch(totals, 5)
    predicted = timeline(totals, [(0, "forward"), (6000, "backward")])
    write_timeline(tmp_path, StepTimeline(step=3, measured=timeline(measured), predicted=predicted))
    found = read_timeline(tmp_path)
    assert found is not None
    assert found.predicted is not None
    assert len(found.predicted.allocated_bytes) <= 4000
    assert max(found.predicted.allocated_bytes) == max(totals)
    tops = [
        side.axis()[side.allocated_bytes.index(max(side.allocated_bytes))]
        for side in (found.predicted, found.measured)
    ]
    assert abs(tops[0] - tops[1]) <= 1
    begin = found.predicted.axis()[found.predicted.phases[1][0]]
    assert abs(begin - tops[0]) < 20
