"""Memory snapshots of PyTorch are read safely and replayed; the snapshots here are hand-made."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from memfit.allocator.caching import CachingAllocator
from memfit.allocator.settings import AllocatorSettings
from memfit.allocator.snapshots import check_snapshot, read_snapshot
from memfit.errors import DataError, UsageError
from memfit.units import MIB

BASE = 0x7F0000000000


def entry(action: str, addr: int, num_bytes: int, stream: int = 0) -> dict:
    return {"action": action, "addr": addr, "size": num_bytes, "stream": stream, "frames": []}


def freed(addr: int, num_bytes: int) -> list[dict]:
    return [entry("free_requested", addr, num_bytes), entry("free_completed", addr, num_bytes)]


def segment(address: int, blocks: list[tuple[int, int, str]], **fields) -> dict:
    """Return a segment whose blocks are (size, requested size, state)."""
    entries = []
    position = address
    for num_bytes, requested_bytes, state in blocks:
        entries.append({
            "address": position,
            "size": num_bytes,
            "requested_size": requested_bytes,
            "state": state,
            "frames": [],
        })  # fmt: skip
        position += num_bytes
    return {
        "address": address,
        "total_size": position - address,
        "stream": 0,
        "device": 0,
        "segment_type": "large",
        "blocks": entries,
        **fields,
    }


def whole_trace() -> dict:
    """Return a trace from the first allocation on: two segments, one freed and taken again.

    30 MiB and 3 MiB are allocated, 30 MiB are freed, the cache is emptied, 31 MiB are allocated.
    """
    return {
        "device_traces": [[
            entry("segment_alloc", BASE, 30 * MIB),
            entry("alloc", BASE, 30 * MIB),
            entry("segment_alloc", BASE + 64 * MIB, 20 * MIB),
            entry("alloc", BASE + 64 * MIB, 3 * MIB - 100),
            *freed(BASE, 30 * MIB),
            entry("segment_free", BASE, 30 * MIB),
            entry("snapshot", 0, 0),
            entry("segment_alloc", BASE, 32 * MIB),
            entry("alloc", BASE, 31 * MIB),
        ]],
        "segments": [
            segment(BASE, [(32 * MIB, 31 * MIB, "active_allocated")]),
            segment(
                BASE + 64 * MIB,
                [(3 * MIB, 3 * MIB - 100, "active_allocated"), (17 * MIB, 0, "inactive")],
            ),
        ],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "roundup_power2_divisions": {str(2**index): 0 for index in range(16)},
        },
    }  # fmt: skip


def test_a_trace_becomes_events_and_sizes() -> None:
    snapshot = read_snapshot(whole_trace())

    assert snapshot.events == (0, 1, -1, 2)
    assert snapshot.sizes == (30 * MIB, 3 * MIB - 100, 31 * MIB)
    assert snapshot.settings == AllocatorSettings(roundup_power2_divisions={})
    assert (snapshot.num_earlier, snapshot.earlier_reserved_bytes) == (0, 0)
    assert [(call.before_event, call.action) for call in snapshot.device_calls] == [
        (0, "segment_alloc"), (1, "segment_alloc"), (3, "segment_free"), (3, "segment_alloc"),
    ]  # fmt: skip


def test_a_replay_that_agrees_says_so() -> None:
    check = check_snapshot(read_snapshot(whole_trace()))

    assert check.agrees
    assert check.first_difference is None
    assert check.simulated_segments_bytes == (30 * MIB, 20 * MIB, 32 * MIB)
    assert check.simulated_peak_reserved_bytes == check.recorded_peak_reserved_bytes == 52 * MIB
    assert check.simulated_end_reserved_bytes == check.recorded_end_reserved_bytes == 52 * MIB


def test_a_replay_that_differs_names_the_first_segment_that_does() -> None:
    content = whole_trace()
    content["device_traces"][0][2] = entry("segment_alloc", BASE + 64 * MIB, 24 * MIB)
    content["segments"][1]["total_size"] = 24 * MIB
    check = check_snapshot(read_snapshot(content))

    assert not check.agrees
    assert check.first_difference == 1


def test_a_missing_segment_is_a_difference_too() -> None:
    content = whole_trace()
    del content["device_traces"][0][-2]
    content["segments"][0]["total_size"] = 0

    assert check_snapshot(read_snapshot(content)).first_difference == 2


def test_what_lived_before_the_trace_comes_first_in_the_order_of_addresses() -> None:
    content = {
        "device_traces": [[
            *freed(BASE + 20 * MIB, 12 * MIB),
            entry("alloc", BASE + 20 * MIB, 10 * MIB),
        ]],
        "segments": [
            segment(
                BASE,
                [(5 * MIB, 5 * MIB - 7, "active_allocated"), (15 * MIB, 0, "inactive")],
                stream=3,
            ),
            segment(
                BASE + 20 * MIB,
                [(10 * MIB, 10 * MIB, "active_allocated"), (2 * MIB, 0, "inactive")],
            ),
        ],
    }  # fmt: skip
    snapshot = read_snapshot(content)

    assert snapshot.num_earlier == 2
    assert [snapshot.sizes[each] for each in snapshot.events[:2]] == [5 * MIB - 7, 12 * MIB]
    assert snapshot.streams[snapshot.events[0]] == 3
    assert len(snapshot.events) == 4
    assert snapshot.earlier_reserved_bytes == 32 * MIB
    check = check_snapshot(snapshot)
    assert check.agrees
    assert check.simulated_segments_bytes == ()


def test_blocks_without_addresses_are_placed_by_their_sizes() -> None:
    content = whole_trace()
    content["device_traces"] = [[entry("snapshot", 0, 0)]]
    for each in content["segments"]:
        for block in each["blocks"]:
            del block["address"]
    snapshot = read_snapshot(content)

    assert [snapshot.sizes[each] for each in snapshot.events] == [31 * MIB, 3 * MIB - 100]


def test_expandable_segments_are_compared_by_their_mappings() -> None:
    content = {
        "device_traces": [[
            entry("segment_map", BASE, 40 * MIB),
            entry("alloc", BASE, 30 * MIB),
            entry("segment_map", BASE + 40 * MIB, 20 * MIB),
            entry("alloc", BASE + 30 * MIB, 25 * MIB),
            *freed(BASE, 30 * MIB),
            entry("segment_unmap", BASE, 20 * MIB),
        ]],
        "segments": [
            segment(
                BASE + 20 * MIB,
                [
                    (10 * MIB, 0, "inactive"),
                    (25 * MIB, 25 * MIB, "active_allocated"),
                    (5 * MIB, 0, "inactive"),
                ],
            )
        ],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    }  # fmt: skip
    check = check_snapshot(read_snapshot(content))

    assert check.agrees
    assert check.simulated_segments_bytes == (40 * MIB, 20 * MIB)
    assert (check.simulated_peak_reserved_bytes, check.simulated_end_reserved_bytes) == (
        60 * MIB,
        40 * MIB,
    )


def test_a_trace_written_by_the_simulation_itself_is_reproduced() -> None:
    allocator = CachingAllocator()
    trace, live = [], []
    for step in range(200):
        num_calls = len(allocator.device.log)
        num_bytes = 1 + (step * 7919 % 97) * 300_000
        block = allocator.allocate(num_bytes)
        trace += [entry(name, 0, size) for name, size in allocator.device.log[num_calls:]]
        trace.append(entry("alloc", block.address, num_bytes))
        live.append((block, num_bytes))
        if step % 3:
            block, num_bytes = live.pop(step * 31 % len(live))
            trace += freed(block.address, num_bytes)
            allocator.free(block)
    total = {"address": 0, "total_size": allocator.reserved_bytes, "blocks": []}
    check = check_snapshot(read_snapshot({"device_traces": [trace], "segments": [total]}))

    assert check.agrees
    assert len(check.simulated_segments_bytes) > 10


def test_the_recorded_settings_are_taken() -> None:
    content = whole_trace()
    content["allocator_settings"] |= {
        "max_split_size": 64 * MIB,
        "expandable_segments": True,
        "garbage_collection_threshold": 0.5,
        "roundup_power2_divisions": {"1": 0, "256": 4},
    }
    expected = AllocatorSettings(
        max_split_size_bytes=64 * MIB,
        expandable_segments=True,
        roundup_power2_divisions={256 * MIB: 4},
    )
    assert read_snapshot(content).settings == expected

    text = "max_split_size_mb:32,per_process_memory_fraction:0.5,garbage_collection_threshold:0.5"
    content["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": text}
    expected = AllocatorSettings(max_split_size_bytes=32 * MIB)
    assert read_snapshot(content).settings == expected

    content["allocator_settings"] = {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}
    with pytest.raises(UsageError, match="cudaMallocAsync"):
        read_snapshot(content)


def test_the_first_device_with_a_trace_is_read_unless_one_is_named() -> None:
    content = whole_trace()
    content["device_traces"].insert(0, [])
    for each in content["segments"]:
        each["device"] = 1

    assert check_snapshot(read_snapshot(content)).agrees
    assert read_snapshot(content, device=1).sizes == read_snapshot(content).sizes
    assert read_snapshot(content, device=0).events == ()


def test_recorded_failures_are_counted() -> None:
    content = whole_trace()
    content["device_traces"][0].append(
        {"action": "oom", "device_free": 0, "size": MIB, "stream": 0}
    )

    assert read_snapshot(content).num_failures == 1


def test_a_pickle_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(whole_trace()))

    assert check_snapshot(read_snapshot(path)).agrees
    assert read_snapshot(str(path)).source == str(path)


class Payload:
    """Something that runs when an ordinary unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_file_that_would_run_something_is_refused(tmp_path: Path) -> None:
    path, made = tmp_path / "snapshot.pickle", tmp_path / "made"
    path.write_bytes(pickle.dumps(whole_trace() | {"extra": Payload(made)}))

    with pytest.raises(DataError, match=r"mkdir, which no snapshot needs"):
        read_snapshot(path)
    assert not made.exists()
    pickle.loads(path.read_bytes())  # the file was able to: the refusal is what kept it from it
    assert made.exists()


@pytest.mark.parametrize(
    ("content", "needed"),
    [
        (b"", "_dump_snapshot"),
        (b"not a pickle", "_dump_snapshot"),
        (pickle.dumps([1, 2]), "dictionary"),
        (pickle.dumps({"segments": []}), "device_traces"),
        (pickle.dumps({"segments": [], "device_traces": [[{"size": 1}]]}), "action"),
    ],
)
def test_a_file_that_is_no_snapshot_is_refused(tmp_path: Path, content, needed) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)

    with pytest.raises(DataError, match=needed) as caught:
        read_snapshot(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_snapshot(tmp_path / "none.pickle")
