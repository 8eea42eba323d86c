"""Segments lie where a CUDA driver places them, which decides between equally large free blocks."""

from __future__ import annotations

import pytest

from memfit.allocator.caching import CachingAllocator
from memfit.allocator.device_memory import DeviceMemory
from memfit.units import MIB


def test_of_equal_blocks_the_one_in_the_newer_segment_is_taken() -> None:
    # The driver places a later segment below an earlier one, and the allocator takes the lowest.
    allocator = CachingAllocator()
    older, newer = (allocator.allocate(40 * MIB) for _ in range(2))
    addresses = [newer.address, older.address]
    for block in (older, newer):
        allocator.free(block)

    assert [allocator.allocate(40 * MIB).address for _ in range(2)] == addresses


def test_segments_lie_where_the_driver_placed_them_in_a_printed_snapshot() -> None:
    # An RTX 3090: 20 MiB at 140198805504000, 512 MiB and 1 GiB right below, in this order, and a
    # small segment in the stretch of the first.
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(size * MIB).address for size in (5, 512, 1024))
    small = allocator.allocate(512).address

    assert first - second == 140198805504000 - 140198268633088
    assert second - third == 140198268633088 - 140197194891264
    assert first + 20 * MIB <= small < first + 32 * MIB


def test_small_segments_fill_a_stretch_upwards_and_then_the_next_one_below() -> None:
    device = DeviceMemory(None)
    addresses = [device.reserve_addresses(2 * MIB) for _ in range(17)]

    assert addresses[:16] == [addresses[0] + 2 * MIB * number for number in range(16)]
    assert addresses[16] == addresses[0] - 32 * MIB


def test_what_a_large_segment_leaves_of_its_stretch_is_given_to_small_ones() -> None:
    device = DeviceMemory(None)
    large = device.reserve_addresses(40 * MIB)

    assert device.reserve_addresses(20 * MIB) == large + 40 * MIB
    assert device.reserve_addresses(4 * MIB) == large + 60 * MIB
    assert device.reserve_addresses(2 * MIB) < large


@pytest.mark.parametrize("num_bytes", [1, 2 * MIB - 1, 2 * MIB])
def test_addresses_are_aligned_to_whole_granules(num_bytes) -> None:
    device = DeviceMemory(None)
    first, second = device.reserve_addresses(num_bytes), device.reserve_addresses(num_bytes)
    assert (first % (2 * MIB), second - first) == (0, 2 * MIB)
