"""Measured allocations get the purpose of the recorded ones they are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memfit
from memfit import Plan
from memfit.prediction.recording import record
from memfit.strategies.micro_batching import MicroBatching
from memfit.trace.alignment import align
from memfit.trace.events import Allocation, Category, Phase


def blocks(*sizes: int) -> list[Allocation]:
    """Make recorded blocks that can be told apart by their module."""
    return [
        Allocation(num_bytes, "addmm", Phase.FORWARD, str(index), Category.TEMPORARIES)
        for index, num_bytes in enumerate(sizes)
    ]


def places(measured, recorded) -> list[int | None]:
    """Return which recorded block each measured one was matched with."""
    matches = align(measured, recorded)
    return [None if match is None else int(match.module) for match in matches]


def test_scratch_that_was_not_recorded_has_no_match():
    recorded = blocks(10, 20, 30, 40, 50, 60)
    assert places([10, 20, 999, 30, 40, 50, 60], recorded) == [0, 1, None, 2, 3, 4, 5]


def test_a_recorded_block_that_was_not_asked_for_is_passed_over():
    recorded = blocks(10, 20, 999, 30, 40, 50)
    assert places([10, 20, 30, 40, 50], recorded) == [0, 1, 3, 4, 5]


def test_outputs_that_come_in_another_order_match_by_their_size():
    recorded = blocks(1, 2, 3, 70, 80, 4, 5, 6)
    assert places([1, 2, 3, 80, 70, 4, 5, 6], recorded) == [0, 1, 2, 4, 3, 5, 6, 7]


def test_scratch_as_large_as_a_later_block_does_not_take_its_place():
    """Numbers wrapped as tensors take 4 bytes each, and so do losses."""
    recorded = blocks(100, 200, 300, 4, 400, 500, 600)
    measured = [4, 4, 100, 200, 300, 4, 400, 500, 600]
    assert places(measured, recorded)[2:] == [0, 1, 2, 3, 4, 5, 6]


SIZES = st.lists(st.integers(1, 6), max_size=40)


@pytest.mark.slow
@given(SIZES, SIZES)
def test_every_measured_block_gets_an_answer_and_no_recorded_one_is_used_twice(measured, recorded):
    found = places(measured, blocks(*recorded))
    assert len(found) == len(measured)
    used = [place for place in found if place is not None]
    assert len(used) == len(set(used))


@given(SIZES, SIZES)
def test_only_blocks_of_the_same_size_are_matched(measured, recorded):
    for num_bytes, match in zip(measured, align(measured, blocks(*recorded)), strict=True):
        assert match is None or match.num_bytes == num_bytes


@pytest.mark.slow
@given(st.lists(st.integers(1, 10**6), max_size=60))
def test_a_sequence_matches_itself(sizes):
    assert places(sizes, blocks(*sizes)) == list(range(len(sizes)))


@pytest.mark.slow
def test_measured_categories_are_the_predicted_ones_also_in_micro_batches(regression_job):
    plan = Plan(strategies=(MicroBatching(micro_batch_size=3),))
    predicted = memfit.predict(regression_job, plan=plan).by_category
    measured = memfit.measure(regression_job, plan).by_category
    assert measured == predicted
    blocks_of_gradients = [
        block
        for block in record(regression_job, plan).steady.allocations
        if block.category is Category.GRADIENTS
    ]
    assert sum(block.num_bytes for block in blocks_of_gradients) == predicted["gradients"] > 0
