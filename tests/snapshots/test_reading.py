"""Snapshots of every version of torch, and of other tools, are read; what is malformed is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.cuda._memory_viz as viewer
from tests.snapshots.recorded_programs import steady_training, varying_lengths
from tests.snapshots.recording_allocator import MIB, OutOfMemoryError, RecordingAllocator
from tests.snapshots.test_layout import STACK

from memfit.allocator.settings import AllocatorSettings
from memfit.errors import DataError
from memfit.snapshots.files import ReadLimits
from memfit.snapshots.reading import read_device
from memfit.snapshots.replaying import replay


def without(content: dict, *names: str) -> dict:
    """Take fields out of all segments, blocks, entries and the snapshot itself."""
    for name in names:
        content.pop(name, None)
        for segment in content["segments"]:
            segment.pop(name, None)
            for block in segment["blocks"]:
                block.pop(name, None)
        for trace in content["device_traces"]:
            for entry in trace:
                entry.pop(name, None)
    return content


def of_torch_2_0(content: dict) -> dict:
    """Write a snapshot as torch 2.0 did: stacks and sizes of blocks in their history."""
    for segment in content["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                latest = {"addr": block["address"], "real_size": block["requested_size"]}
                block["history"] = [{**latest, "frames": block.pop("frames")}]
            else:
                block.pop("frames")
    return without(
        content, "address_of_block", "requested_size", "pool_id", "segment_pool_id", "time_us",
        "is_expandable", "compile_context", "user_metadata", "allocator_settings",
        "external_annotations",
    )  # fmt: skip


VERSIONS = {
    "2.0": of_torch_2_0,
    "2.1": lambda c: without(
        c, "pool_id", "compile_context", "user_metadata", "is_expandable", "external_annotations"
    ),
    "2.5": lambda c: without(c, "pool_id", "compile_context", "user_metadata"),
    "2.13": lambda c: c,
}


def fresh(content: dict) -> dict:
    return copy.deepcopy(content)


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_a_snapshot_of_every_version_says_the_same(version) -> None:
    content = varying_lengths(fill=0.8).snapshot()
    expected = replay(content)
    older = VERSIONS[version](fresh(content))
    assert viewer.segsum(older) == viewer.segsum(content)
    found = replay(older)

    assert (found.allocated_bytes, found.reserved_bytes) == (
        expected.allocated_bytes,
        expected.reserved_bytes,
    )
    assert found.by_line == expected.by_line
    assert [each.survives for each in found.outcomes] == [e.survives for e in expected.outcomes]
    assert any("defaults are assumed" in note for note in found.notes) is (version == "2.0")


def test_blocks_of_old_snapshots_without_addresses_lie_one_behind_the_other() -> None:
    content = steady_training().snapshot()
    expected = read_device("it", fresh(content), None, ReadLimits())
    for segment in content["segments"]:
        for block in segment["blocks"]:
            del block["address"]

    assert read_device("it", content, None, ReadLimits()) == expected


def test_entries_of_unknown_kinds_change_nothing() -> None:
    content = steady_training().snapshot()
    expected = replay(fresh(content))
    extra = {"action": "user_defined", "addr": 0, "size": 0, "stream": 0, "frames": []}
    content["device_traces"][0][5:5] = [
        extra,
        {"action": "snapshot"},
        {"action": "of 2030", "x": 1},
    ]
    content["external_annotations"] = [
        {"name": "step", "stage": "START", "device": 0, "time_us": 1}
    ]
    found = replay(content)

    assert found.num_entries == expected.num_entries + 3
    assert found.entry == expected.entry + 3
    assert found.outcomes == expected.outcomes


def test_entries_may_lack_stacks_or_have_those_of_c_plus_plus() -> None:
    content = steady_training().snapshot()
    for entry in content["device_traces"][0]:
        entry["frames"] = [{"name": "at::empty", "filename": "/build/aten/Empty.cpp", "line": 9}]
    for segment in content["segments"]:
        for block in segment["blocks"]:
            block.pop("frames")
    assert {each.name for each in replay(fresh(content)).by_line} == {"aten/Empty.cpp:9 at::empty"}
    for entry in content["device_traces"][0]:
        del entry["frames"]

    assert {each.name for each in replay(content).by_line} == {"(no stack recorded)"}


def several_devices() -> dict:
    quiet, failed = RecordingAllocator(2**40, device=1), RecordingAllocator(50 * MIB, device=3)
    for _ in range(9):
        quiet.malloc(3 * MIB, STACK)
    failed.malloc(40 * MIB, STACK)
    with pytest.raises(OutOfMemoryError):
        failed.malloc(20 * MIB, STACK)
    content = failed.snapshot()
    content["device_traces"][1] = quiet.snapshot()["device_traces"][1]
    content["segments"] += quiet.snapshot()["segments"]
    return content


def test_the_device_that_ran_out_is_chosen_among_several() -> None:
    content = several_devices()
    result = replay(content)

    assert (result.device, result.kind, result.allocated_bytes) == (3, "failure", 40 * MIB)
    assert any("2 devices are in it" in note for note in result.notes)
    assert replay(content, device=1).allocated_bytes == 27 * MIB
    with pytest.raises(DataError, match=r"device 0 is not in it; there: 1, 3"):
        replay(content, device=0)


def test_without_a_failure_the_longest_history_is_chosen() -> None:
    content = several_devices()
    del content["device_traces"][3][-1]

    assert replay(content).device == 1


def test_segments_alone_show_who_holds_what() -> None:
    allocator = steady_training()
    content = {"segments": allocator.snapshot()["segments"]}
    result = replay(content)

    assert (result.kind, result.outcomes, result.agreement) == ("end", (), None)
    assert result.allocated_bytes == allocator.allocated
    assert sum(each.num_bytes for each in result.by_line) == allocator.allocated
    assert "project/model.py:20 forward" in {each.name for each in result.by_line}
    assert any("has no history" in note for note in result.notes)


def test_a_snapshot_of_the_profiler_has_categories_and_no_allocator() -> None:
    """What ``torch.cuda._memory_viz.profile_plot`` makes of a profile, on the CPU as well."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.profiler.profile(
        profile_memory=True, record_shapes=True, with_stack=True
    ) as profile:
        for _ in range(2):
            model(torch.randn(64, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    content = viewer._profile_to_snapshot(profile)
    result = replay(content)

    assert sum(result.by_category.values()) == result.allocated_bytes > 256 * 256 * 4
    assert {"gradient", "activation", "optimizer_state"} & result.by_category.keys()
    assert (result.free, result.outcomes) == (None, ())
    assert any("Torch's profiler wrote this" in note for note in result.notes)


def test_frees_that_were_left_out_are_told_and_nothing_is_claimed() -> None:
    content = varying_lengths(fill=0.8).snapshot()
    trace = content["device_traces"][0]
    content["device_traces"] = [[each for each in trace if each["action"] != "free_completed"]]
    result = replay(content)

    assert result.allocated_bytes == varying_lengths(fill=0.8).allocated  # from the segments
    assert any("freed without an entry" in note for note in result.notes)
    assert not any(each.survives for each in result.outcomes)


def test_the_recorded_settings_are_taken() -> None:
    content = steady_training().snapshot()
    settings = content["allocator_settings"]
    settings |= {"max_split_size": 64 * MIB, "expandable_segments": True}
    settings["roundup_power2_divisions"] = {"1": 0, "256": 4}
    record = read_device("it", content, None, ReadLimits())

    assert record.settings == AllocatorSettings(
        max_split_size_bytes=64 * MIB,
        expandable_segments=True,
        roundup_power2_divisions={256 * MIB: 4},
    )
    assert AllocatorSettings.parse(record.settings_text).expandable_segments
    settings["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:32,per_process_memory_fraction:0.5"
    record = read_device("it", content, None, ReadLimits())
    assert record.settings == AllocatorSettings(max_split_size_bytes=32 * MIB)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"])
def test_settings_are_found_under_the_names_of_other_backends(name) -> None:
    content = steady_training().snapshot()
    content["allocator_settings"] = {name: "expandable_segments:True"}

    assert replay(content).settings == "expandable_segments:True"


def test_a_limit_on_splitting_that_is_the_largest_number_is_none() -> None:
    content = steady_training().snapshot()
    content["allocator_settings"]["max_split_size"] = 2**63 - 1

    assert read_device("it", content, None, ReadLimits()).settings.max_split_size_bytes is None


def test_settings_that_are_not_known_are_told_and_the_parts_taken() -> None:
    content = steady_training().snapshot()
    content["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "of_2030:7"

    assert any("known in part" in note for note in replay(content).notes)


def broken(change) -> dict:
    content = steady_training(num_steps=1).snapshot()
    change(content)
    return content


def first_block(content: dict) -> dict:
    return content["segments"][0]["blocks"][0]


MALFORMED = {
    "segments that are a text": lambda c: c.update(segments="abc"),
    "segments of numbers": lambda c: c.update(segments=[1, 2]),
    "traces that are a number": lambda c: c.update(device_traces=7),
    "traces of dictionaries": lambda c: c.update(device_traces=[{}]),
    "neither of them": lambda c: (c.pop("segments"), c.pop("device_traces")),
    "an entry that is a number": lambda c: c["device_traces"][0].append(3),
    "an entry without an action": lambda c: c["device_traces"][0].append({}),
    "an action that is a list": lambda c: c["device_traces"][0].append({"action": []}),
    "an address that is a text": lambda c: c["device_traces"][0][0].update(addr="0x7f"),
    "an address of 2**70": lambda c: c["device_traces"][0][0].update(addr=2**70),
    "a negative size": lambda c: c["device_traces"][0][1].update(size=-5),
    "a size of 2**60": lambda c: c["device_traces"][0][1].update(size=2**60),
    "a size that is a number with a point": lambda c: c["device_traces"][0][1].update(size=1.5),
    "a size that is true": lambda c: c["device_traces"][0][1].update(size=True),
    "a pool of three": lambda c: c["device_traces"][0][1].update(pool_id=(0, 0, 0)),
    "a segment twice": lambda c: c["segments"].append(c["segments"][0]),
    "a segment without a size": lambda c: c["segments"][0].pop("total_size"),
    "a block outside of its segment": lambda c: first_block(c).update(address=5),
    "a block larger than its segment": lambda c: first_block(c).update(size=2**40),
    "a block in no state": lambda c: first_block(c).update(state="gone"),
    "blocks that are numbers": lambda c: c["segments"][0].update(blocks=[1]),
    "settings that are a list": lambda c: c.update(allocator_settings=[]),
    "settings that are no text": lambda c: c.update(
        allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": 7}
    ),
    "another backend": lambda c: c["allocator_settings"].update(
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync"
    ),
    "divisions that are a text": lambda c: c["allocator_settings"].update(
        roundup_power2_divisions="abc"
    ),
    "a device that is a text": lambda c: c["segments"][0].update(device="cuda:0"),
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_what_is_malformed_is_refused_in_one_sentence(name) -> None:
    with pytest.raises(DataError) as caught:
        replay(broken(MALFORMED[name]))
    assert len(str(caught.value)) < 400


ODD = {
    "no segments": lambda c: c.pop("segments"),
    "no traces": lambda c: c.pop("device_traces"),
    "an empty history": lambda c: c.update(device_traces=[[]]),
    "nothing at all": lambda c: c.update(device_traces=[], segments=[]),
    "stacks that are a text": lambda c: first_block(c).update(frames="abc"),
    "stacks of numbers": lambda c: [e.update(frames=[1, None]) for e in c["device_traces"][0]],
    "frames without a file": lambda c: [e.update(frames=[{}]) for e in c["device_traces"][0]],
    "frames of other kinds": lambda c: [
        e.update(frames=[{"filename": 3, "line": "x", "name": ["a"]}]) for e in c["device_traces"][0]
    ],
    "an allocation of nothing": lambda c: c["device_traces"][0][1].update(size=0),
    "a failure first": lambda c: c["device_traces"][0].insert(0, c["device_traces"][0][-1]),
    "nothing but the failure": lambda c: c.update(device_traces=[c["device_traces"][0][-1:]]),
    "history backwards": lambda c: c["device_traces"][0].reverse(),
    "history twice": lambda c: c["device_traces"][0].extend(list(c["device_traces"][0])),
    "frees alone": lambda c: c.update(device_traces=[[
        each for each in c["device_traces"][0] if each["action"] == "free_completed"
    ]]),
    "all on one address": lambda c: [e.update(addr=2**40) for e in c["device_traces"][0]
                                     if "addr" in e],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ODD))
def test_what_is_odd_gives_an_answer_that_claims_no_survival_without_a_replay(name) -> None:
    result = replay(broken(ODD[name]))

    assert result.allocated_bytes <= result.reserved_bytes
    if result.agreement is None or not result.agreement.is_reproduced:
        assert not any(each.survives for each in result.outcomes)


def test_what_is_made_to_take_for_ever_is_ended() -> None:
    content = steady_training().snapshot()

    with pytest.raises(DataError, match=r"more than 0 seconds"):
        replay(content, limits=ReadLimits(max_seconds=0.0))
    shared = content["device_traces"][0]
    with pytest.raises(DataError, match=r"more entries than all cards"):
        replay({"device_traces": [shared] * 1_000_000, "segments": []})


def test_one_list_of_blocks_in_many_segments_is_refused() -> None:
    blocks = [{"size": 512, "requested_size": 512, "state": "inactive", "frames": []}] * 100
    segments = [
        {"address": number * 64 * MIB, "total_size": 20 * MIB, "blocks": blocks}
        for number in range(100)
    ]

    with pytest.raises(DataError, match=r"more than 900 blocks"):
        replay({"segments": segments}, limits=ReadLimits(max_blocks=900))


def test_a_history_that_is_too_long_is_refused() -> None:
    content = steady_training().snapshot()

    with pytest.raises(DataError, match=r"218 entries, and at most 100 are replayed"):
        replay(content, limits=ReadLimits(max_entries=100))
    with pytest.raises(DataError, match=r"more than 3 blocks"):
        replay(content, limits=ReadLimits(max_blocks=3))
