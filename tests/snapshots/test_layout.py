"""Where blocks lie is followed from entry to entry, and back to before the first one."""

from __future__ import annotations

import random

import pytest
from tests.snapshots.recording_allocator import MIB, OutOfMemoryError, RecordingAllocator

from memfit.snapshots.files import ReadLimits
from memfit.snapshots.history import History, history_of
from memfit.snapshots.layout import LayoutError
from memfit.snapshots.reading import read_device

STACK = [{"name": "f", "filename": "/home/user/a.py", "line": 1}]


def written(snapshot: dict) -> History:
    return history_of(read_device("it", snapshot, None, ReadLimits()))


def pieces_of(segments: list[dict]) -> list[tuple[int, int, bool]]:
    """List what torch says lies in its segments, as address, bytes and whether it is in use."""
    return [
        (block["address"], block["size"], block["state"] != "inactive")
        for segment in segments
        for block in segment["blocks"]
    ]


def wild_program(*, expandable: bool, seed: int, num_steps: int = 150) -> RecordingAllocator:
    """Requests of all sizes on two streams and a private pool, some of them refused."""
    draw = random.Random(seed)
    allocator = RecordingAllocator(500 * MIB, expandable=expandable)
    alive: list = []
    for _ in range(num_steps):
        number = draw.random()
        if alive and number < 0.42:
            allocator.free(alive.pop(draw.randrange(len(alive))), STACK)
        elif number < 0.45:
            allocator.empty_cache()
        else:
            size = int(2 ** draw.uniform(5, 26.5))
            stream, owner = draw.choice([(0, (0, 0)), (0, (0, 0)), (7, (0, 0)), (9, (3, 0))])
            try:
                alive.append(allocator.malloc(size, STACK, stream, owner))
            except OutOfMemoryError:
                continue
    return allocator


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("keep_last", [None, 200, 40])
def test_the_layout_leads_from_what_is_left_of_the_history_to_the_segments(
    expandable, seed, keep_last
) -> None:
    snapshot = wild_program(expandable=expandable, seed=seed).snapshot(keep_last=keep_last)
    history = written(snapshot)
    layout = history.start()
    for _ in history.follow(layout):
        pass

    found = [piece for _, pieces in layout.runs() for piece in pieces]
    assert [(p.address, p.num_bytes, p.in_use) for p in found] == pieces_of(snapshot["segments"])
    assert layout.reserved_bytes == sum(each["total_size"] for each in snapshot["segments"])
    assert layout.allocated_bytes == sum(each["allocated_size"] for each in snapshot["segments"])


def test_a_block_that_is_still_there_has_the_size_that_the_segment_says() -> None:
    """As with roundup_power2_divisions in a snapshot that does not say its settings."""
    used = {"address": 64 * MIB, "size": 8 * MIB, "requested_size": 7 * MIB}
    free = {"address": 72 * MIB, "size": 12 * MIB, "requested_size": 0, "state": "inactive"}
    segment = {
        "address": 64 * MIB, "total_size": 20 * MIB, "segment_type": "large",
        "blocks": [{**used, "state": "active_allocated"}, free],
    }  # fmt: skip
    layout = written({"device_traces": [], "segments": [segment]}).start()

    assert layout.allocated_bytes == 8 * MIB


def test_a_whole_history_begins_with_nothing() -> None:
    layout = written(wild_program(expandable=False, seed=1).snapshot()).start()

    assert (layout.reserved_bytes, layout.allocated_bytes) == (0, 0)


def entries_of(*parts: tuple[str, int, int]) -> list[dict]:
    return [
        {"action": name, "addr": address, "size": size, "stream": 0}
        for name, address, size in parts
    ]


CONTRADICTIONS = {
    "an allocation where no segment is": [("alloc", 64 * MIB, 512)],
    "an allocation larger than what is free": [
        ("segment_alloc", 64 * MIB, 2 * MIB), ("alloc", 64 * MIB, 3 * MIB),
    ],
    "an allocation in the middle of a free block": [
        ("segment_alloc", 64 * MIB, 20 * MIB), ("alloc", 66 * MIB, 2 * MIB),
    ],
    "a segment given back in use": [
        ("segment_alloc", 64 * MIB, 20 * MIB), ("alloc", 64 * MIB, 2 * MIB),
        ("segment_free", 64 * MIB, 20 * MIB),
    ],
    "a segment given back in parts": [
        ("segment_alloc", 64 * MIB, 20 * MIB), ("segment_free", 64 * MIB, 2 * MIB),
    ],
    "an allocation of what is in use": [
        ("segment_alloc", 64 * MIB, 20 * MIB), ("alloc", 64 * MIB, 2 * MIB),
        ("alloc", 64 * MIB, 3 * MIB),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CONTRADICTIONS))
def test_a_history_that_contradicts_itself_is_not_followed(name) -> None:
    history = written({"device_traces": [entries_of(*CONTRADICTIONS[name])], "segments": []})

    with pytest.raises(LayoutError):
        for _ in history.follow(history.start()):
            pass


def test_a_free_of_what_was_freed_is_counted_as_missing() -> None:
    free = ("free_completed", 64 * MIB, 512)
    history = written({"device_traces": [entries_of(free, free)], "segments": []})

    assert history.num_missing_frees == 1
