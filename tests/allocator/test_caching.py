"""The simulated caching allocator follows PyTorch's, rule by rule, with numbers worked out by hand."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.allocator.blocks import ALLOCATED, FREE, UNMAPPED
from memfit.allocator.caching import CachingAllocator, DeviceExhaustedError
from memfit.allocator.replay import simulate_events, smallest_capacity_bytes
from memfit.allocator.settings import AllocatorSettings
from memfit.errors import UsageError
from memfit.units import KIB, MIB

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def given_back(allocator: CachingAllocator) -> list[int]:
    """Return the MiB of each return to the device, in order."""
    return [
        num_bytes // MIB
        for action, num_bytes in allocator.device.log
        if action in {"segment_free", "segment_unmap"}
    ]


def taken(allocator: CachingAllocator) -> list[int]:
    """Return the MiB of each taking from the device, in order."""
    return [
        num_bytes // MIB
        for action, num_bytes in allocator.device.log
        if action in {"segment_alloc", "segment_map"}
    ]


def cache(allocator: CachingAllocator, *sizes_mib: int) -> list[int]:
    """Allocate blocks, then free them all; return where they are."""
    blocks = [allocator.allocate(size * MIB) for size in sizes_mib]
    addresses = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    return addresses


@pytest.mark.parametrize(
    ("divisions", "num_bytes", "expected"),
    [
        (0, 1, 512), (0, 512, 512), (0, 513, 1024), (1, 1200 * KIB + 1, 1200 * KIB + 512),
        (4, 1200 * KIB, 1280 * KIB), (4, 1280 * KIB, 1280 * KIB), (4, 1280 * KIB + 1, 1536 * KIB),
        (4, 2 * MIB, 2 * MIB), (4, 300, 512), (4, 1537, 2048), (4, 2048, 2048), (4, 2049, 2560),
        (2, 100 * MIB, 128 * MIB), (2, 90 * MIB, 96 * MIB), (16, 8192, 8192), (16, 8193, 8704),
    ],
)  # fmt: skip
def test_requests_are_rounded_to_512_bytes_or_to_a_division(divisions, num_bytes, expected) -> None:
    allocator = CachingAllocator(AllocatorSettings(roundup_power2_divisions=divisions))

    assert allocator.rounded(num_bytes) == expected
    assert allocator.allocate(num_bytes).num_bytes == expected


def test_each_interval_has_its_own_divisions() -> None:
    by_interval = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,>:4]")
    rounded = CachingAllocator(by_interval).rounded

    assert rounded(300 * MIB + 1) == 300 * MIB + 512
    assert rounded(600 * MIB) == 768 * MIB
    assert rounded(1100 * MIB) == 1280 * MIB
    assert rounded(70 * 1024 * MIB) == 80 * 1024 * MIB


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_request_of_nothing_is_refused(num_bytes) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CachingAllocator().allocate(num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "segment_mib"),
    [
        (1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20),
        (10 * MIB - 511, 10), (10 * MIB, 10), (10 * MIB + 1, 12), (513 * MIB, 514),
    ],
)  # fmt: skip
def test_the_segment_follows_from_the_rounded_request(num_bytes, segment_mib) -> None:
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)

    assert allocator.reserved_bytes == segment_mib * MIB
    assert (allocator.num_segments, allocator.num_device_allocations) == (1, 1)


def test_the_segment_of_middle_sizes_can_be_set() -> None:
    allocator = CachingAllocator(AllocatorSettings(large_segment_bytes=12 * MIB))
    allocator.allocate(2 * MIB)

    assert allocator.reserved_bytes == 12 * MIB


@pytest.mark.parametrize(
    ("num_bytes", "counted_bytes"),
    [
        (2 * MIB - 512, 2 * MIB - 512),  # 18 MiB + 512 remain: split
        (19 * MIB, 20 * MIB),  # its own segment of 20 MiB, of which exactly 1 MiB remains: whole
        (19 * MIB - 512, 19 * MIB - 512),  # 1 MiB + 512 remain: split
        (21 * MIB + 512, 22 * MIB),
        (MIB - 512, MIB - 512),  # small: split from 512 bytes on
    ],
)
def test_a_remainder_too_small_to_split_off_counts_as_allocated(num_bytes, counted_bytes) -> None:
    allocator = CachingAllocator()
    allocator.allocate(num_bytes)

    assert allocator.allocated_bytes == counted_bytes


def test_small_blocks_fill_their_segment_to_the_last_512_bytes() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(1) for _ in range(4096)]

    assert allocator.allocated_bytes == allocator.reserved_bytes == 2 * MIB
    assert blocks[-1].address == blocks[0].address + 2 * MIB - 512
    allocator.allocate(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_small_requests_never_take_from_the_large_pool() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(2 * MIB))
    allocator.allocate(MIB)

    assert taken(allocator) == [20, 2]


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    addresses = cache(allocator, 60, 40, 50)

    assert allocator.allocate(39 * MIB + 1).address == addresses[1]
    assert allocator.allocate(39 * MIB + 1).address == addresses[2]
    assert allocator.allocate(39 * MIB + 1).address == addresses[0]


def test_among_equal_blocks_the_lowest_address_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(40 * MIB) for _ in range(3)]
    addresses = [block.address for block in blocks]
    for block in (blocks[2], blocks[0], blocks[1]):
        allocator.free(block)

    assert [allocator.allocate(40 * MIB).address for _ in range(3)] == sorted(addresses)


def test_a_block_belongs_to_its_stream() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(40 * MIB, stream=1))

    allocator.allocate(40 * MIB, stream=2)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate(40 * MIB, stream=1)
    assert allocator.reserved_bytes == 80 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_free_neighbours_merge_in_any_order(order) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(6 * MIB) for _ in range(3)]
    for index in order:
        allocator.free(blocks[index])

    (free_block,) = allocator.pools()[0].blocks
    assert (free_block.num_bytes, free_block.is_split()) == (20 * MIB, False)


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(1)
    allocator.free(block)

    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(block)


def test_emptying_the_cache_keeps_segments_that_are_partly_used() -> None:
    allocator = CachingAllocator()
    kept = allocator.allocate(5 * MIB)
    allocator.free(allocator.allocate(5 * MIB))
    allocator.free(allocator.allocate(30 * MIB))
    allocator.free(allocator.allocate(100))

    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    assert given_back(allocator) == [30, 2]
    allocator.free(kept)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.num_segments) == (0, 0)


def test_cached_segments_are_given_back_when_the_device_has_no_more() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(70 * MIB)

    assert (allocator.reserved_bytes, allocator.num_retries) == (70 * MIB, 1)
    assert allocator.peak_reserved_bytes == 70 * MIB


def test_what_does_not_fit_is_told_with_its_numbers() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.allocate(60 * MIB)
    allocator.free(allocator.allocate(5 * MIB))

    with pytest.raises(DeviceExhaustedError, match=r"60\.0 MiB are allocated") as caught:
        allocator.allocate(50 * MIB + 1)
    assert caught.value.requested_bytes == 50 * MIB + 512
    assert caught.value.allocated_bytes == caught.value.reserved_bytes == 60 * MIB
    assert caught.value.capacity_bytes == 100 * MIB


def test_the_peaks_can_begin_anew() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB))
    allocator.reset_peaks()

    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (0, 30 * MIB)


# --- max_split_size ---


def oversize(capacity_bytes: int | None = None) -> CachingAllocator:
    """Return an allocator that never splits blocks of 40 MiB or more."""
    return CachingAllocator(AllocatorSettings(max_split_size_bytes=40 * MIB), capacity_bytes)


def test_an_unsplittable_block_serves_no_request_below_the_limit() -> None:
    allocator = oversize()
    allocator.free(allocator.allocate(50 * MIB))
    allocator.allocate(30 * MIB)

    assert taken(allocator) == [50, 30]


@pytest.mark.parametrize(("cached_mib", "is_reused"), [(68, True), (70, False), (72, False)])
def test_an_unsplittable_block_is_reused_whole_within_20_mib(cached_mib, is_reused) -> None:
    allocator = oversize()
    allocator.free(allocator.allocate(cached_mib * MIB))
    block = allocator.allocate(50 * MIB)

    assert block.num_bytes == (cached_mib if is_reused else 50) * MIB
    assert taken(allocator) == ([cached_mib] if is_reused else [cached_mib, 50])


@pytest.mark.parametrize(
    ("capacity_mib", "cached_mib", "wanted_mib", "given_back_mib", "num_retries"),
    [(130, (80, 42), 50, [80], 0), (150, (50, 40, 44), 90, [50, 44], 0), (100, (40, 30), 80, [40, 30], 1)],
    ids=["one that is large enough", "several from the largest on", "too few, so all the cache"],
)  # fmt: skip
def test_unsplittable_blocks_are_given_back_before_all_the_cache_is(
    capacity_mib, cached_mib, wanted_mib, given_back_mib, num_retries
) -> None:
    allocator = oversize(capacity_mib * MIB)
    cache(allocator, *cached_mib)
    allocator.allocate(wanted_mib * MIB)

    assert (given_back(allocator), allocator.num_retries) == (given_back_mib, num_retries)


# --- memory fraction and garbage collection ---


def test_a_memory_fraction_bounds_the_reserved_memory() -> None:
    half = AllocatorSettings(per_process_memory_fraction=0.5)
    allocator = CachingAllocator(half, capacity_bytes=100 * MIB)
    allocator.allocate(50 * MIB)

    with pytest.raises(DeviceExhaustedError) as caught:
        allocator.allocate(1)
    assert caught.value.capacity_bytes == 50 * MIB


def test_a_memory_fraction_needs_a_capacity() -> None:
    with pytest.raises(UsageError, match="capacity_bytes"):
        CachingAllocator(AllocatorSettings(per_process_memory_fraction=0.5))


@pytest.mark.parametrize(
    ("threshold", "collected_mib"),
    [
        (0.6, []),
        (0.4, [60]),  # above 200 MiB: 52 too many; ages 2 and 1, of which 2 is above the average
        (0.38, [60, 62]),  # above 190 MiB: 62 too many, 60 are not enough
    ],
)
def test_blocks_are_collected_from_the_oldest_until_the_threshold_is_kept(
    threshold, collected_mib
) -> None:
    """Searches: 60, 62, 64 are the first three, 66 the fourth; 60 is freed before, 62 after it."""
    allocator = CachingAllocator(
        AllocatorSettings(per_process_memory_fraction=0.5, garbage_collection_threshold=threshold),
        capacity_bytes=1000 * MIB,
    )
    first, second, _ = (allocator.allocate(size * MIB) for size in (60, 62, 64))
    allocator.free(first)
    allocator.allocate(66 * MIB)
    allocator.free(second)
    allocator.allocate(70 * MIB)  # the fifth search, at 252 MiB reserved

    assert given_back(allocator) == collected_mib
    assert allocator.reserved_bytes == (252 + 70 - sum(collected_mib)) * MIB


def test_without_a_fraction_the_threshold_does_nothing() -> None:
    allocator = CachingAllocator(
        AllocatorSettings(garbage_collection_threshold=0.1), capacity_bytes=1000 * MIB
    )
    allocator.free(allocator.allocate(300 * MIB))
    allocator.allocate(400 * MIB)

    assert given_back(allocator) == []


# --- expandable segments ---


def test_an_expandable_segment_grows_by_granules() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.allocate(30 * MIB)
    second = allocator.allocate(10 * MIB)
    third = allocator.allocate(5 * MIB)
    allocator.allocate(1)

    assert taken(allocator) == [40, 20, 2]
    assert second.address == first.address + 30 * MIB
    assert third.address == first.address + 40 * MIB
    assert allocator.num_segments == 0


def test_what_is_free_at_the_end_of_an_expandable_segment_is_used_when_it_grows() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.allocate(30 * MIB)
    block = allocator.allocate(25 * MIB)  # 10 MiB are free there: 15 more, one granule

    assert taken(allocator) == [40, 20]
    assert block.num_bytes == 25 * MIB


def test_only_whole_free_granules_are_unmapped_and_later_filled_first() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.allocate(30 * MIB)
    second = allocator.allocate(30 * MIB)
    start = first.address
    allocator.free(first)
    allocator.empty_cache()
    assert given_back(allocator) == [20]  # [0, 20) goes, [20, 30) shares its granule with second

    block = allocator.allocate(20 * MIB)
    assert (block.address, taken(allocator)) == (start, [40, 20, 20])
    allocator.free(block)
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_a_free_block_that_cannot_grow_is_preferred_to_one_that_can() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.allocate(25 * MIB)
    allocator.allocate(5 * MIB)
    allocator.allocate(25 * MIB)  # leaves 5 MiB at the end, with unmapped addresses behind
    start = first.address
    allocator.free(first)

    assert allocator.allocate(4 * MIB).address == start


def test_expandable_remainders_are_split_from_512_bytes_on() -> None:
    allocator = CachingAllocator(EXPANDABLE)

    assert allocator.allocate(20 * MIB - 512).num_bytes == 20 * MIB - 512


def test_each_stream_has_its_own_expandable_segment() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.allocate(5 * MIB, stream=1)
    allocator.allocate(5 * MIB, stream=2)

    assert taken(allocator) == [20, 20]


def test_granules_have_to_fit_the_device_whole() -> None:
    assert CachingAllocator(EXPANDABLE, 50 * MIB).allocate(40 * MIB).num_bytes == 40 * MIB
    with pytest.raises(DeviceExhaustedError):
        CachingAllocator(EXPANDABLE, 50 * MIB).allocate(41 * MIB)


# --- replaying events ---


def test_an_outcome_tells_peaks_ends_and_fragmentation() -> None:
    sizes = [12 * MIB, 3 * MIB, 0, 4 * MIB]
    outcome = simulate_events([0, 1, 2, -1, 3, -3], sizes)

    assert outcome.survived
    assert outcome.failed_event is None
    assert outcome.peak_allocated_bytes == 15 * MIB
    assert outcome.peak_reserved_bytes == outcome.end_reserved_bytes == 32 * MIB
    assert outcome.end_allocated_bytes == 7 * MIB  # 4 MiB came from the 12 MiB that were free
    assert outcome.fragmentation_fraction == 17 / 32
    assert (outcome.num_device_allocations, outcome.windows) == (2, ())


def test_marks_give_the_peaks_of_their_windows() -> None:
    sizes = [30 * MIB, 40 * MIB, 2 * MIB]
    outcome = simulate_events([0, 1, -1, -2, 2, -3], sizes, marks=[3, 4, 6])

    assert [window.first_event for window in outcome.windows] == [3, 4, 6]
    assert [window.peak_allocated_bytes // MIB for window in outcome.windows] == [40, 2, 0]
    assert [window.peak_reserved_bytes // MIB for window in outcome.windows] == [70, 70, 70]
    assert outcome.peak_allocated_bytes == 70 * MIB


@pytest.mark.parametrize("marks", [[2, 1], [3], [-1]])
def test_marks_must_be_ascending_positions(marks) -> None:
    with pytest.raises(ValueError, match="marks"):
        simulate_events([0, -1], [1], marks=marks)


def test_a_replay_ends_at_the_request_that_fails() -> None:
    outcome = simulate_events(
        [0, 1, -1, -2], [30 * MIB, 30 * MIB], capacity_bytes=50 * MIB, marks=[1, 2]
    )

    assert (outcome.survived, outcome.failed_event, outcome.num_retries) == (False, 1, 1)
    assert outcome.peak_allocated_bytes == outcome.end_reserved_bytes == 30 * MIB
    assert len(outcome.windows) == 1


def test_freeing_what_is_not_alive_is_an_error_in_the_events() -> None:
    with pytest.raises(ValueError, match="allocation 0"):
        simulate_events([0, -1, -1], [1])


def test_the_smallest_capacity_can_be_below_the_peak_of_reserved_memory() -> None:
    events, sizes = [0, -1, 1, -2], [60 * MIB, 70 * MIB]

    assert simulate_events(events, sizes).peak_reserved_bytes == 130 * MIB
    assert smallest_capacity_bytes(events, sizes) == 70 * MIB
    half = AllocatorSettings(per_process_memory_fraction=0.5)
    assert smallest_capacity_bytes(events, sizes, half) == 140 * MIB
    assert smallest_capacity_bytes([], []) == 0


# --- properties ---

SIZES = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, MIB), st.integers(MIB, 12 * MIB),
    st.integers(10 * MIB, 90 * MIB), st.sampled_from([512, MIB, 10 * MIB, 20 * MIB, 40 * MIB]),
)  # fmt: skip
SETTINGS = st.builds(
    AllocatorSettings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, None, 20 * MIB, 40 * MIB]),
    large_segment_bytes=st.sampled_from([12 * MIB, 20 * MIB]),
    roundup_power2_divisions=st.sampled_from([0, 4]),
)
# A step allocates on a stream, frees one of the live blocks, or empties the cache.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 10**6), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 10**6), st.just(0)),
        st.just(("empty", 0, 0)),
    ),
    max_size=40,
)


def check_structure(allocator: CachingAllocator, live: list) -> None:
    """Check everything that must hold between two calls."""
    blocks = {id(block): block for block in live}
    for pool in allocator.pools():
        assert pool.keys == sorted(pool.keys)
        assert all(block.state == FREE for block in pool.blocks)
        assert all(block.state == UNMAPPED for block in pool.unmapped)
        blocks |= {id(block): block for block in (*pool.blocks, *pool.unmapped)}
    for block in blocks.values():
        if block.next is not None:
            assert id(block.next) in blocks
            assert block.next.previous is block
            assert block.next.address == block.address + block.num_bytes
            assert block.state == ALLOCATED or block.state != block.next.state
    ordered = sorted(blocks.values(), key=lambda block: block.address)
    assert all(one.address + one.num_bytes <= other.address for one, other in pairwise(ordered))
    held = [block.num_bytes for block in ordered if block.state != UNMAPPED]
    assert sum(held) == allocator.reserved_bytes >= allocator.allocated_bytes
    assert sum(block.num_bytes for block in live) == allocator.allocated_bytes


@pytest.mark.slow
@given(SETTINGS, STEPS, st.sampled_from([None, 150 * MIB]))
@settings(max_examples=400, deadline=None)
def test_blocks_and_segments_stay_consistent(chosen, steps, capacity_bytes) -> None:
    allocator = CachingAllocator(chosen, capacity_bytes)
    live = []
    peaks = (0, 0)
    for action, value, stream in steps:
        if action == "allocate":
            with contextlib.suppress(DeviceExhaustedError):
                live.append(allocator.allocate(value, stream))
                assert live[-1].num_bytes >= allocator.rounded(value)
                assert live[-1].pool.stream == stream
        elif action == "free" and live:
            allocator.free(live.pop(value % len(live)))
        elif action == "empty":
            allocator.empty_cache()
        check_structure(allocator, live)
        assert capacity_bytes is None or allocator.reserved_bytes <= capacity_bytes
        now = (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
        assert now[0] >= max(peaks[0], allocator.allocated_bytes)
        assert now[1] >= max(peaks[1], allocator.reserved_bytes)
        peaks = now
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)
    assert not any(pool.keys for pool in allocator.pools())
    assert not any(block.is_split() for pool in allocator.pools() for block in pool.unmapped)


@st.composite
def recorded_steps(draw):
    """Draw events and sizes as a trace has them."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=25))
    events, alive = [], []
    for index in range(len(sizes)):
        while alive and draw(st.booleans()):
            events.append(-1 - alive.pop(draw(st.integers(0, len(alive) - 1))))
        events.append(index)
        alive.append(index)
    return events, sizes


@pytest.mark.slow
@given(recorded_steps(), SETTINGS)
@settings(max_examples=150, deadline=None)
def test_the_peak_of_reserved_memory_always_suffices(step, chosen) -> None:
    events, sizes = step
    free_of_limits = simulate_events(events, sizes, settings=chosen)
    peak_bytes = free_of_limits.peak_reserved_bytes

    assert simulate_events(events, sizes, settings=chosen, capacity_bytes=peak_bytes).survived
    smallest = smallest_capacity_bytes(events, sizes, chosen)
    assert smallest <= -(-peak_bytes // (2 * MIB)) * 2 * MIB
    assert simulate_events(events, sizes, settings=chosen, capacity_bytes=smallest).survived
    less = simulate_events(events, sizes, settings=chosen, capacity_bytes=smallest - 2 * MIB)
    assert not less.survived


@pytest.mark.slow
@given(recorded_steps(), SETTINGS, st.data())
@settings(max_examples=150, deadline=None)
def test_windows_add_up_to_the_whole(step, chosen, data) -> None:
    events, sizes = step
    marks = sorted(data.draw(st.lists(st.integers(0, len(events)), max_size=3)))
    whole = simulate_events(events, sizes, settings=chosen)
    parts = simulate_events(events, sizes, settings=chosen, marks=[0, *marks])

    assert max(window.peak_allocated_bytes for window in parts.windows) == (
        whole.peak_allocated_bytes
    )
    assert max(window.peak_reserved_bytes for window in parts.windows) == whole.peak_reserved_bytes
    assert 0.0 <= whole.fragmentation_fraction <= 1.0
