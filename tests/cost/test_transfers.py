"""Copies beside the computation, against timelines worked out by hand."""

from __future__ import annotations

import pytest

from memfit.cost.transfers import BlockWork, added_seconds

LINK = 100.0  # bytes per second, so that 100 bytes take a second


def block(forward, backward, num_bytes, back_bytes=None):
    return BlockWork(
        forward_seconds=forward,
        backward_seconds=backward,
        out_bytes=num_bytes,
        in_bytes=num_bytes if back_bytes is None else back_bytes,
    )


def step_seconds(blocks):
    computed = sum(each.forward_seconds + each.backward_seconds for each in blocks)
    return computed + added_seconds(blocks, LINK)


def test_what_is_moved_nowhere_takes_its_computation():
    assert step_seconds([block(1, 2, 0), block(3, 4, 0)]) == 10


def test_copies_as_long_as_the_computation_are_hidden():
    """Forward 0-1, 1-2, 2-3 with copies out 1-2 and 2-3; backward 3-5, 5-7, 7-9, back 3-4, 5-6."""
    assert step_seconds([block(1, 2, 100)] * 3) == 9


def test_slow_copies_hold_up_the_forward_and_the_backward():
    """Out of block 0: 1-4, so block 1 (1-2) is left at 4. Out of block 1: 4-7, block 2 ends at 7.

    Backward of block 2: 7-9, block 1 comes back 7-10. Block 1: 10-12, block 0 comes back 10-13.
    Block 0: 13-15.
    """
    assert step_seconds([block(1, 2, 300)] * 3) == 15


def test_the_last_block_stays():
    assert step_seconds([block(1, 1, 0), block(1, 1, 10_000)]) == 4
    assert step_seconds([block(1, 1, 10_000)]) == 2


def test_a_copy_back_waits_for_the_one_before_it():
    """Backward from 4: block 3 4-5, block 2 comes back 4-6. Block 2: 6-7, block 1 back 6-9.

    Block 1: 9-10, and block 0, asked for at 9, is there at 13.
    """
    blocks = [block(1, 1, 0, back_bytes) for back_bytes in (400, 300, 200, 100)]
    assert step_seconds(blocks) == 14


def test_bytes_that_come_in_a_burst_are_asked_for_one_block_ahead():
    blocks = [block(4, 1, 0), block(4, 1, 300), block(4, 1, 0), block(4, 4, 0)]
    # Backward from 16: 4 for block 3, 1 for block 2; block 1's bytes take 3 once asked for.
    assert step_seconds(blocks) == 16 + 4 + 3 + 1 + 1


def test_no_blocks_take_no_time():
    assert added_seconds([], LINK) == 0


@pytest.mark.parametrize("num_blocks", [2, 5, 9])
@pytest.mark.parametrize(("num_bytes", "is_hidden"), [(99, True), (100, True), (101, False)])
def test_copies_of_even_blocks_are_hidden_up_to_the_time_of_a_block(
    num_blocks, num_bytes, is_hidden
):
    added = added_seconds([block(1.0, 1.0, num_bytes)] * num_blocks, LINK)
    assert (added < 1e-9) is is_hidden
