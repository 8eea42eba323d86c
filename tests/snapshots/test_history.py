"""Blocks from before the history are found, and releases of the program told from those for want."""

from __future__ import annotations

import pytest
from tests.snapshots.test_layout import written

from memfit.snapshots.history import Release, releases_of
from memfit.snapshots.records import PoolKey
from memfit.units import MIB

BASE = 64 * MIB
EMPTY_CACHE = [
    {"name": "empty_cache", "filename": "/x/torch/cuda/memory.py", "line": 240},
    {"name": "main", "filename": "/home/user/train.py", "line": 8},
]


def entry(action: str, mib: int, at: int = 0, **fields) -> dict:
    place = "device_free" if action == "oom" else "addr"
    return {"action": action, place: BASE + at * MIB, "size": mib * MIB, "stream": 0, **fields}


def history_of(*entries: dict):
    return written({"device_traces": [list(entries)], "segments": []})


GIVEN_BACK = (
    entry("segment_alloc", 30),
    entry("alloc", 30),
    entry("free_completed", 30),
    entry("segment_free", 30),
)
"""A block that came and went, and its segment that went back: before event 2."""
RELEASES = {
    "nothing after it": ((), 100, True),
    "something small after it, which would have fit": (
        (entry("segment_alloc", 40, 200),),
        100,
        True,
    ),
    "something after it that would not have fit": ((entry("segment_alloc", 80, 200),), 100, False),
    "a mapping after it that would not have fit": ((entry("segment_map", 80, 200),), 100, False),
    "an allocation from the cache after it": ((entry("alloc", 2, 300),), 100, True),
    "something after it, and no limit": ((entry("segment_alloc", 80, 200),), None, True),
}


def found(history, limit_mib: int | None, until: int | None = None) -> list[Release]:
    return releases_of(
        history,
        limit_bytes=None if limit_mib is None else limit_mib * MIB,
        reserved_bytes=0,
        until=len(history.entries) if until is None else until,
    )


@pytest.mark.parametrize("name", sorted(RELEASES))
def test_a_release_is_the_program_s_where_nothing_was_wanting(name) -> None:
    after, limit_mib, is_own = RELEASES[name]
    releases = found(history_of(*GIVEN_BACK, *after), limit_mib)

    assert releases == ([Release(2, None)] if is_own else [])


def test_a_stack_that_names_empty_cache_decides() -> None:
    *before, last = GIVEN_BACK
    history = history_of(*before, {**last, "frames": EMPTY_CACHE}, entry("segment_alloc", 80, 200))

    assert found(history, 100) == [Release(2, None)]


def test_what_a_replay_releases_by_itself_at_the_failure_is_left_to_it() -> None:
    history = history_of(*GIVEN_BACK, entry("oom", 80), *GIVEN_BACK, entry("oom", 90))

    assert found(history, 100, until=9) == [Release(2, None)]  # the first failure did happen
    assert found(history, 100, until=4) == []


def test_a_private_pool_is_given_up_by_itself() -> None:
    pool = {"pool_id": (3, 0), "stream": 5}
    history = history_of(*({**each, **pool} for each in GIVEN_BACK), entry("segment_free", 20, 400))

    assert found(history, 100) == [Release(2, None), Release(2, PoolKey(5, (3, 0)))]


def test_frees_that_complete_while_memory_is_given_back_belong_to_it() -> None:
    """The allocator waits for other streams first; the frees come in between."""
    history = history_of(
        entry("segment_alloc", 30),
        entry("alloc", 10),
        entry("segment_free", 40, 200),
        entry("free_completed", 10),
        entry("segment_free", 30),
        entry("segment_alloc", 90, 300),
    )

    assert found(history, 120) == [Release(1, None)]  # 30 were reserved, and 90 are asked for
    assert found(history, 119) == []


def test_blocks_from_before_are_known_from_their_frees_and_from_the_segments() -> None:
    block = {"address": BASE + 20 * MIB, "size": 5 * MIB, "requested_size": 5 * MIB - 7}
    free = {"address": BASE, "size": 20 * MIB, "requested_size": 0, "state": "inactive"}
    segment = {
        "address": BASE, "total_size": 25 * MIB, "stream": 3, "device": 0, "segment_type": "large",
        "blocks": [free, {**block, "state": "active_pending_free", "frames": EMPTY_CACHE}],
    }  # fmt: skip
    entries = [entry("free_completed", 12), entry("alloc", 10), entry("free_completed", 10)]
    history = written({"device_traces": [entries], "segments": [segment]})

    assert history.earlier == {BASE: (12 * MIB, 0), BASE + 20 * MIB: (5 * MIB - 7, 2)}
    assert history.events == [-1, 1, -2]
    assert history.allocations[2].pool == PoolKey(3, (0, 0))
    assert history.allocations[2].frames == EMPTY_CACHE
    assert history.num_missing_frees == 0
