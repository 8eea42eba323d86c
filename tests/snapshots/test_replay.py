"""What is said of a snapshot is what a second allocator does when it runs the same program anew."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.cuda._memory_viz as viewer
from tests.snapshots.recorded_programs import (
    LOADING,
    OPTIMIZER,
    steady_training,
    varying_lengths,
)
from tests.snapshots.recording_allocator import MIB, OutOfMemoryError, RecordingAllocator
from tests.snapshots.test_layout import STACK, wild_program

from memfit.allocator.settings import AllocatorSettings
from memfit.snapshots.files import ReadLimits
from memfit.snapshots.history import history_of
from memfit.snapshots.reading import read_device
from memfit.snapshots.replaying import replay
from memfit.snapshots.result import Outcome, SnapshotReplay
from memfit.snapshots.survival import Moment, Replayer

PROGRAMS: dict[str, Callable[..., RecordingAllocator]] = {
    "steady training": steady_training,
    "varying lengths": lambda **kw: varying_lengths(fill=0.8, **kw),
    "expandable segments": lambda **kw: varying_lengths(**{"expandable": True, "fill": 0.95, **kw}),
}
"""Each ends when memory runs out: at a large request, in pieces, and with one growing segment."""
each_program = pytest.mark.parametrize("name", sorted(PROGRAMS))


def outcome(result: SnapshotReplay, settings: str) -> Outcome:
    return next(each for each in result.outcomes if each.settings == settings)


@each_program
def test_torch_s_own_viewer_takes_the_snapshots(name) -> None:
    content = PROGRAMS[name]().snapshot()

    assert sum(map(viewer.calc_active, content["segments"])) == PROGRAMS[name]().allocated
    assert "total_allocated" in viewer.segsum(content)
    assert "raise OutOfMemoryError" in viewer.trace(content)
    assert "snapshot.pickle" in viewer.trace_plot(content)
    assert "snapshot.pickle" in viewer.segment_plot(content)
    assert "train.py:88:main" in viewer.memory(content, format_flamegraph=str)
    assert "stream_0;seg_" in viewer.segments(content, format_flamegraph=str)


@each_program
def test_the_moment_of_failure_is_described_to_the_byte(name) -> None:
    allocator = PROGRAMS[name]()
    content = allocator.snapshot()
    result = replay(content)
    failure = allocator.trace[-1]

    assert result.kind == "failure"
    assert result.request.num_bytes == failure["size"]
    assert result.allocated_bytes == allocator.allocated
    assert result.reserved_bytes == allocator.reserved
    assert result.limit_bytes == allocator.capacity
    assert sum(each.num_bytes for each in result.by_line) == allocator.allocated
    assert sum(result.by_doing.values()) == allocator.allocated
    free = [b.size for s in allocator.segments for b in s.blocks if b.state == "free"]
    assert (result.free.total_bytes, result.free.num_blocks) == (sum(free), len(free))
    assert result.free.largest_block_bytes == max(free)
    assert result.free.returnable_bytes == 0


@each_program
def test_the_replay_meets_every_recorded_call_to_the_device(name) -> None:
    agreement = replay(PROGRAMS[name]().snapshot()).agreement

    assert agreement.is_reproduced
    assert agreement.num_equal_segments == agreement.num_recorded_segments > 10
    assert agreement.simulated_peak_reserved_bytes == agreement.recorded_peak_reserved_bytes


def events_of(allocator: RecordingAllocator) -> list[tuple[str, int, int, int, tuple]]:
    """List what the program did, without what the allocator made of it."""
    taken = {"alloc", "free_completed", "oom"}
    return [
        (each["action"], each.get("addr", 0), each["size"], each["stream"], each["pool_id"])
        for each in allocator.trace
        if each["action"] in taken
    ]


SETTINGS = {
    "": {},
    "expandable_segments:True": {"expandable": True},
    "max_split_size_mb:128": {"max_split": 128 * MIB},
    "max_split_size_mb:512": {"max_split": 512 * MIB},
    "roundup_power2_divisions:4": {"divisions": 4},
    "roundup_power2_divisions:16": {"divisions": 16},
}


def rerun(recorded: RecordingAllocator, text: str, *, less: int = 0) -> bool:
    """Run the recorded program anew up to its failure; tell whether the second allocator serves it."""
    allocator = RecordingAllocator(recorded.capacity, **SETTINGS[text])
    alive: dict[int, object] = {}
    for action, address, size, stream, owner in events_of(recorded):
        try:
            if action == "alloc":
                alive[address] = allocator.malloc(size, STACK, stream, owner)
            elif action == "oom":
                allocator.malloc(size - less, STACK, stream, owner)
            else:
                allocator.free(alive.pop(address), STACK)
        except OutOfMemoryError:
            return False
    return True


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("was", sorted(SETTINGS))
def test_what_survives_under_other_settings_survives_in_a_second_allocator(seed, was) -> None:
    fill = 0.95 if was in {"expandable_segments:True", "max_split_size_mb:128"} else 0.8
    recorded = varying_lengths(seed=seed, fill=fill, **SETTINGS[was])
    result = replay(recorded.snapshot())

    assert (result.kind, result.settings) == ("failure", was)
    assert result.agreement.num_equal_segments == result.agreement.num_recorded_segments
    for text in SETTINGS:
        assert outcome(result, text).survives is rerun(recorded, text), text


def test_pieces_that_are_too_small_are_named_and_one_growing_segment_would_do() -> None:
    recorded = varying_lengths(fill=0.8)
    result = replay(recorded.snapshot())

    assert outcome(result, "expandable_segments:True").survives is True
    assert outcome(result, "").survives is False
    assert result.free.total_bytes > result.request.num_bytes > result.free.largest_block_bytes
    assert result.free.too_small_bytes == result.free.total_bytes


@each_program
def test_the_least_reduction_is_served_and_a_little_less_is_not(name) -> None:
    recorded = PROGRAMS[name]()
    result = replay(recorded.snapshot())
    checked = 0
    for text in SETTINGS:
        least = outcome(result, text).least_reduction_bytes
        if least:
            checked += 1
            assert rerun(recorded, text, less=least), text
            assert not rerun(recorded, text, less=least - 512), text
    assert checked


def test_a_request_that_no_setting_serves_is_said_to_be_too_large() -> None:
    recorded = steady_training()
    result = replay(recorded.snapshot())

    assert {each.survives for each in result.outcomes} == {False}
    assert all(each.least_reduction_bytes > 100 * MIB for each in result.outcomes)
    assert result.request.missing_bytes == 150 * MIB
    assert result.request.line == "project/model.py:60 forward"
    assert result.request.doing == "forward"
    held = [block for segment in recorded.segments for block in segment.blocks]
    stacks = {"optimizer": [OPTIMIZER], "moving or loading": [LOADING]}
    expected = {
        doing: sum(block.size for block in held if block.frames in frames)
        for doing, frames in stacks.items()
    }
    expected["forward"] = recorded.allocated - sum(expected.values())
    assert result.by_doing == expected


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("expandable", [False, True])
def test_streams_private_pools_and_emptied_caches_are_replayed(seed, expandable) -> None:
    """Every recorded state of the reserved memory is met, also with refusals on the way."""
    recorded = wild_program(expandable=expandable, seed=seed)
    result = replay(recorded.snapshot(), limit_bytes=recorded.capacity)

    assert result.agreement.num_equal_segments == result.agreement.num_recorded_segments
    assert (
        result.agreement.simulated_peak_reserved_bytes
        == result.agreement.recorded_peak_reserved_bytes
    )


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("kept", [0.1, 0.5, 0.95])
def test_a_history_that_has_forgotten_its_beginning_goes_on_from_the_segments(
    kept, expandable
) -> None:
    """The layout before the first entry is worked out, so the recorded settings replay exactly."""
    recorded = varying_lengths(fill=0.95 if expandable else 0.8, expandable=expandable, seed=1)
    whole = replay(recorded.snapshot())
    cut = replay(recorded.snapshot(keep_last=int(len(recorded.trace) * kept)))

    assert cut.num_earlier_blocks > 0
    assert any("forgotten its beginning" in note for note in cut.notes)
    assert cut.agreement.is_reproduced
    assert cut.agreement.num_equal_segments == cut.agreement.num_recorded_segments
    assert cut.outcomes[0].least_reduction_bytes == whole.outcomes[0].least_reduction_bytes
    assert (cut.allocated_bytes, cut.reserved_bytes) == (
        whole.allocated_bytes,
        whole.reserved_bytes,
    )


def test_what_rests_on_a_forgotten_beginning_is_called_a_guess() -> None:
    recorded = varying_lengths(fill=0.8)
    whole, cut = (replay(recorded.snapshot(keep_last=last)) for last in (None, 200))

    assert {each.is_guess for each in whole.outcomes} == {False}
    assert [each.is_guess for each in cut.outcomes] == [False] + [True] * 6


@pytest.mark.slow
def test_a_long_history_takes_seconds() -> None:
    """A hundred thousand entries take less than a minute, so fourteen thousand less than eight."""
    content = varying_lengths(fill=0.62, num_requests=4000).snapshot()
    assert len(content["device_traces"][0]) > 14_000
    begin = time.process_time()
    replay(content)

    assert time.process_time() - begin < 8


def test_other_settings_are_not_known_where_two_starts_lead_apart() -> None:
    result = replay(varying_lengths(fill=0.8).snapshot(keep_last=60))
    other = outcome(result, "expandable_segments:True")

    assert other.survives is None
    assert "one behind the other" in other.reason
    assert other.least_reduction_bytes is None


def test_nothing_is_said_to_survive_where_the_record_itself_is_not_reproduced() -> None:
    recorded = varying_lengths(fill=0.8)
    content = recorded.snapshot()
    content["device_traces"][0][-1]["size"] = 512  # there is room for that: the refusal is a riddle
    result = replay(content)

    assert not result.agreement.is_reproduced
    assert not any(each.survives for each in result.outcomes)
    assert "sees less than happened" in outcome(result, "expandable_segments:True").reason


def test_a_refusal_although_the_device_had_enough_is_a_limit_of_another_kind() -> None:
    """As with a memory fraction: what was reserved then is all that is sure."""
    allocator = RecordingAllocator(300 * MIB)
    allocator.malloc(200 * MIB, STACK)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(150 * MIB, STACK)
    content = allocator.snapshot()
    content["device_traces"][0][-1]["device_free"] = 900 * MIB
    result = replay(content)

    assert result.limit_bytes == 200 * MIB
    assert "something else set the limit" in result.limit_source
    assert result.request.missing_bytes is None


def test_a_given_limit_is_taken_instead() -> None:
    recorded = steady_training()
    wide = replay(recorded.snapshot(), limit_bytes=2**40)
    tight = replay(recorded.snapshot(), limit_bytes=recorded.capacity - 50 * MIB)

    assert (wide.limit_bytes, wide.limit_source) == (2**40, "given")
    assert wide.agreement.is_reproduced  # under the limit that there was
    assert {each.survives for each in wide.outcomes} == {True}
    assert {each.survives for each in tight.outcomes} == {False}
    assert outcome(tight, "").least_reduction_bytes == 200 * MIB
    enough = replay(recorded.snapshot(), limit_bytes=recorded.capacity + 150 * MIB)
    assert outcome(enough, "").survives is True


def test_without_a_failure_the_peak_is_described_and_a_limit_can_be_asked_for() -> None:
    allocator = RecordingAllocator(2**40)
    small, large = allocator.malloc(30 * MIB, STACK), allocator.malloc(70 * MIB, STACK)
    allocator.free(large, STACK)
    allocator.malloc(40 * MIB, STACK)
    allocator.free(small, STACK)
    content = allocator.snapshot()
    open_ended = replay(content)

    assert open_ended.kind == "peak"
    assert open_ended.allocated_bytes == 100 * MIB
    assert open_ended.request is None
    assert {each.survives for each in open_ended.outcomes} == {None}
    assert outcome(replay(content, limit_bytes=100 * MIB), "").survives is True
    tight = outcome(replay(content, limit_bytes=99 * MIB), "")
    assert (tight.survives, tight.failed_request_bytes) == (False, 70 * MIB)


def test_the_program_may_have_gone_on_after_the_failure() -> None:
    allocator = RecordingAllocator(100 * MIB)
    first = allocator.malloc(60 * MIB, STACK)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(50 * MIB, STACK)
    allocator.free(first, STACK)
    allocator.malloc(90 * MIB, STACK)
    result = replay(allocator.snapshot())

    assert result.allocated_bytes == result.reserved_bytes == 60 * MIB
    assert result.limit_bytes == 100 * MIB
    assert outcome(result, "").least_reduction_bytes == 10 * MIB
    assert any("1 allocations follow" in note for note in result.notes)


def test_the_last_of_several_failures_is_described() -> None:
    allocator = RecordingAllocator(100 * MIB)
    allocator.malloc(60 * MIB, STACK)
    for num_bytes in (50 * MIB, 70 * MIB):
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(num_bytes, STACK)
    result = replay(allocator.snapshot())

    assert (result.num_failures, result.request.num_bytes) == (2, 70 * MIB)


def test_settings_of_one_s_own_are_tried_too() -> None:
    text = "max_split_size_mb:64,roundup_power2_divisions:2"

    assert replay(steady_training().snapshot(), settings=[text]).outcomes[-1].settings == text


def test_a_setting_that_is_the_recorded_one_is_not_tried_twice() -> None:
    settings = [each.settings for each in replay(steady_training().snapshot()).outcomes]

    assert settings.count("") == 1
    assert len(settings) == len(set(settings)) == 7


def test_a_file_is_replayed_as_its_content_is(tmp_path: Path) -> None:
    content = steady_training().snapshot()
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    found, expected = replay(path).to_json(), replay(content).to_json()

    assert found.pop("source") == str(path)
    expected.pop("source")
    assert found == expected


def test_collection_needs_a_fraction_and_acts_with_one() -> None:
    """Without a memory fraction below one, torch collects nothing (malloc, garbage collection)."""
    allocator = RecordingAllocator(200 * MIB)
    blocks = [allocator.malloc(num_mib * MIB, STACK) for num_mib in (50, 60, 70)]
    for block in blocks:
        allocator.free(block, STACK)
    for _ in range(3):
        allocator.free(allocator.malloc(70 * MIB, STACK), STACK)
    allocator.malloc(71 * MIB, STACK)
    history = history_of(read_device("it", allocator.snapshot(), None, ReadLimits()))
    moment = Moment(
        num_events=len(history.events), request_bytes=None, pool=None, limit_bytes=300 * MIB
    )
    replayer = Replayer(history, history.start(), ())
    plain = replayer.run(AllocatorSettings(), moment, is_packed=False)
    collecting = AllocatorSettings(garbage_collection_threshold=0.5)
    collected = replayer.run(collecting, moment, is_packed=False)

    assert plain.peak_reserved_bytes == (180 + 72) * MIB
    assert [action for action, _ in collected.device_calls].count("segment_free") == 2


def test_another_limit_does_not_change_what_the_program_gave_back() -> None:
    """Memory given back for want of it would have stayed under a larger limit."""
    allocator = RecordingAllocator(100 * MIB)
    allocator.free(allocator.malloc(60 * MIB, STACK), STACK)
    allocator.malloc(70 * MIB, STACK)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(50 * MIB, STACK)
    content = allocator.snapshot()

    assert outcome(replay(content), "").peak_reserved_bytes == 70 * MIB
    assert outcome(replay(content, limit_bytes=2**40), "").peak_reserved_bytes == 130 * MIB
