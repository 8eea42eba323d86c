"""Intervals add up, in squares, what is unknown of a peak."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.allocator.settings import AllocatorSettings
from memfit.figures import Certainty, Interval
from memfit.prediction.card_replays import replayed_peaks
from memfit.prediction.peak_range import PeakRange
from memfit.prediction.recording import StepRecording
from memfit.trace.events import Allocation, Category, Extra, Phase, StepMark, Trace
from memfit.units import MIB


def peak(low=1000, high=1000, **fields):
    return PeakRange(likely_bytes=1000, low_bytes=low, high_bytes=high, **fields)


def test_a_peak_that_is_replayed_alike_keeps_the_margin_alone():
    assert peak().interval("allocated") == Interval(low_bytes=990, high_bytes=1010)
    assert peak().interval("reserved") == Interval(low_bytes=955, high_bytes=1045)
    assert peak().interval("process") == peak().interval("reserved")


def test_what_the_replays_leave_open_is_added_to_the_margin_in_squares():
    # 45 of margin and 60 of range on one side, 45 and 400 on the other
    assert peak(low=940, high=1400).interval("reserved") == Interval(
        low_bytes=1000 - 75, high_bytes=1000 + 402
    )


def test_where_a_library_chooses_its_scratch_the_margin_is_wide():
    assert peak(is_guessed=True).interval("reserved") == Interval(low_bytes=850, high_bytes=1150)
    assert peak(is_guessed=True).interval("allocated") == Interval(low_bytes=980, high_bytes=1020)


@pytest.mark.parametrize("is_guessed", [False, True])
def test_of_one_rank_among_several_less_is_known(is_guessed):
    found = peak(is_shared=True, is_guessed=is_guessed)
    assert found.interval("allocated") == Interval(low_bytes=920, high_bytes=1080)
    assert found.plus(1000).interval("process") == Interval(low_bytes=1700, high_bytes=2300)


def test_a_replay_knows_whether_ranks_share_the_step():
    alone = recording_with(MIB, Certainty.TABLE)
    for sizes, is_shared in (((), False), ((1,), False), ((1, 8), True)):
        found = replayed_peaks(replace(alone, group_sizes=sizes), AllocatorSettings())
        assert [each.is_shared for each in found] == [is_shared] * 2


@pytest.mark.parametrize(
    ("certainty", "ends"),
    [
        (Certainty.EXACT, (1910, 2090)),
        (Certainty.TABLE, (1865, 2134)),  # 90 and 100 in squares: 134.5
        (Certainty.GUESS, (1491, 2508)),  # 90 and 500: 508.04
    ],
)
def test_a_guessed_context_widens_by_half_of_it_and_one_from_a_table_by_a_tenth(certainty, ends):
    whole = peak().plus(1000, certainty)  # 2000 bytes, 90 of margin
    found = whole.interval("process")

    assert whole.likely_bytes == 2000
    assert (found.low_bytes, found.high_bytes) == ends


def test_an_interval_never_begins_below_nothing():
    assert peak(low=0, is_guessed=True).interval("reserved").low_bytes == 0


def recording_with(extra_bytes: int, certainty: Certainty) -> StepRecording:
    """Record a tensor of 100 MiB and scratch of which nothing to ``extra_bytes`` are taken."""
    blocks = [
        Allocation(size, "op", Phase.FORWARD, "", Category.TEMPORARIES)
        for size in (100 * MIB, extra_bytes // 2)
    ]
    extra = Extra(1, 0, extra_bytes, certainty, "source")
    history = Trace(allocations=blocks, events=[0, 1, -2, -1], extras=[extra])
    return StepRecording(
        history=history, marks=[StepMark(0, 4, 0, 0)], card=None, record_seconds=0.0
    )


@pytest.mark.parametrize(
    ("extra_bytes", "certainty", "is_guessed"),
    [
        (20 * MIB, Certainty.GUESS, True),
        (20 * MIB, Certainty.TABLE, False),
        (MIB // 2, Certainty.GUESS, False),  # half of a hundredth of the peak
    ],
)
def test_scratch_widens_the_margin_if_it_is_guessed_and_noticeable(
    extra_bytes, certainty, is_guessed
):
    found = replayed_peaks(recording_with(extra_bytes, certainty), AllocatorSettings())
    assert [each.is_guessed for each in found] == [is_guessed] * 2


def test_the_least_and_the_most_scratch_are_the_ends_of_a_range():
    allocated, _ = replayed_peaks(recording_with(20 * MIB, Certainty.GUESS), AllocatorSettings())
    found = (allocated.low_bytes, allocated.likely_bytes, allocated.high_bytes)
    assert found == (100 * MIB, 110 * MIB, 120 * MIB)
