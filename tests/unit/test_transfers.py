"""Copies beside the computation, against timelines worked out by hand."""

from __future__ import annotations

import pytest

from memfit.cost.transfers import BlockWork, is_hidden, overlapped

LINK = 100.0  # bytes per second, so that 100 bytes take a second


def block(forward, backward, num_bytes):
    return BlockWork(
        forward_seconds=forward, backward_seconds=backward, out_bytes=num_bytes, in_bytes=num_bytes
    )


def test_what_is_moved_nowhere_takes_its_computation():
    found = overlapped([block(1, 2, 0), block(3, 4, 0)], LINK, between_seconds=5)
    assert found.step_seconds == 15
    assert found.waited_seconds == 0
    assert found.peak_in_flight_bytes == 0


def test_copies_as_long_as_the_computation_are_hidden():
    """Forward 0-1, 1-2, 2-3 with copies out 1-2 and 2-3; backward 3-5, 5-7, 7-9, back 3-4, 5-6."""
    found = overlapped([block(1, 2, 100)] * 3, LINK)
    assert found.step_seconds == 9
    assert found.waited_seconds == 0
    assert found.peak_in_flight_bytes == 100


def test_slow_copies_hold_up_the_forward_and_the_backward():
    """Out of block 0: 1-4, so block 1 (1-2) is left at 4. Out of block 1: 4-7, block 2 ends at 7.

    Backward of block 2: 7-9, block 1 comes back 7-10. Block 1: 10-12, block 0 comes back 10-13.
    Block 0: 13-15.
    """
    found = overlapped([block(1, 2, 300)] * 3, LINK)
    assert found.step_seconds == 15
    assert found.waited_seconds == 6
    # Block 0 is asked for when block 1, which is on its way still, is needed.
    assert found.peak_in_flight_bytes == 600


def test_the_last_block_stays():
    found = overlapped([block(1, 1, 0), block(1, 1, 10_000)], LINK)
    assert found.step_seconds == 4
    assert overlapped([block(1, 1, 10_000)], LINK).step_seconds == 2


def test_the_head_gives_copies_no_more_time_to_go_out():
    """The last block waits for the one before it, whatever comes afterwards."""
    found = overlapped([block(1, 2, 300)] * 2, LINK, between_seconds=5)
    # Out: 1-4; head 4-9; backward 9-11 while block 0 comes back 9-12; its backward 12-14.
    assert found.step_seconds == 14


def test_asking_two_blocks_ahead_hides_bytes_that_come_in_bursts():
    blocks = [block(4, 1, 0), block(4, 1, 300), block(4, 1, 0), block(4, 4, 0)]
    # Backward from 16: 4 for block 3, 1 for block 2; block 1's bytes take 3 once asked for.
    assert overlapped(blocks, LINK, blocks_ahead=1).step_seconds == 16 + 4 + 3 + 1 + 1
    assert overlapped(blocks, LINK, blocks_ahead=2).step_seconds == 16 + 4 + 1 + 1 + 1


def test_nothing_asked_ahead_is_waited_for_whole():
    found = overlapped([block(1, 2, 100)] * 3, LINK, blocks_ahead=0)
    assert found.waited_seconds == 2


def test_no_blocks_take_what_lies_between():
    assert overlapped([], LINK, between_seconds=1.5).step_seconds == 1.5


def test_what_has_come_is_in_flight_no_more():
    found = overlapped([block(10, 10, 100), block(10, 10, 200), block(10, 10, 400)], LINK)
    assert found.peak_in_flight_bytes == 200


@pytest.mark.parametrize(("num_bytes", "hidden"), [(200, True), (201, False)])
def test_the_rule_of_thumb(num_bytes, hidden):
    assert is_hidden(num_bytes, 2.0, LINK) is hidden


@pytest.mark.parametrize("num_blocks", [2, 5, 9])
@pytest.mark.parametrize("num_bytes", [99, 100, 101])
def test_even_blocks_follow_the_rule_of_thumb(num_blocks, num_bytes):
    found = overlapped([block(1.0, 1.0, num_bytes)] * num_blocks, LINK)
    hidden = is_hidden(num_bytes, 1.0, LINK)
    assert (found.waited_seconds < 1e-9) is hidden
