"""What a journal tells of running out of memory, and what it leaves open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.zoo.run_records import ENDING, FACTS, LEAK, OUT_OF_MEMORY, STEP

from memfit.errors import DataError
from memfit.figures import Timeline
from memfit.journal.folder import JournalWriter
from memfit.journal.records import Reason
from memfit.journal.timeline import StepTimeline, write_timeline
from memfit.snapshots.run_folder import replay_run
from memfit.units import MIB

OUT = replace(
    ENDING, reason=Reason.OUT_OF_MEMORY, ended_by="out-of-memory", leaks=(),
    sentence="The card refused 2 GiB.", budget_bytes=None,
)  # fmt: skip


def write(folder: Path, *records: object, ending=OUT) -> Path:
    writer = JournalWriter(folder)
    writer.begin(FACTS)
    for record in records:
        writer.step(record) if hasattr(record, "step_seconds") else writer.event(record)
    if ending is not None:
        writer.end(ending)
    writer.close()
    return folder


def step(number: int, mib: int) -> object:
    return replace(STEP, step=number, peak_allocated_bytes=mib * MIB, peak_reserved_bytes=mib * MIB)


def test_the_step_that_failed_is_the_one_after_the_last_that_was_measured(tmp_path: Path) -> None:
    found = replay_run(write(tmp_path, step(1, 50), step(2, 90), step(3, 70)))

    assert (found.kind, found.reason) == ("run-failure", "out-of-memory")
    assert (found.failed_step, found.last_step, found.peak_step) == (4, 3, 2)
    assert found.peak_allocated_bytes == 90 * MIB
    assert found.sentence == "The card refused 2 GiB."
    assert found.budget_bytes == FACTS.budget_bytes
    assert any("left no peak" in note for note in found.notes)
    assert any("_record_memory_history" in note for note in found.notes)


def test_the_first_step_may_be_the_one_that_failed(tmp_path: Path) -> None:
    found = replay_run(write(tmp_path))

    assert (found.failed_step, found.peak_allocated_bytes) == (1, None)
    assert any("No step was measured" in note for note in found.notes)


def test_what_held_the_memory_is_that_of_the_highest_point_of_the_timeline(tmp_path: Path) -> None:
    write_timeline(
        write(tmp_path, step(1, 50)),
        StepTimeline(
            step=1,
            measured=Timeline(
                allocated_bytes=[10, 90, 40],
                by_category={"activations": [0, 60, 20], "parameters": [10, 30, 20], "buffers": [0, 0, 0]},
                phases=[(0, "forward")],
            ),
        ),
    )  # fmt: skip
    found = replay_run(tmp_path)

    assert list(found.by_category.items()) == [("activations", 60), ("parameters", 30)]
    assert found.category_step == 1


def test_a_run_that_went_on_names_the_step_that_ran_out_before(tmp_path: Path) -> None:
    done = replace(OUT, reason=Reason.DONE, ended_by="", sentence="Done.")
    found = replay_run(write(tmp_path, OUT_OF_MEMORY, step(9, 50), ending=done))

    assert (found.kind, found.failed_step, found.phase) == ("run-peak", 7, "backward")
    assert found.events[0].startswith("Step 7 ran out of memory in backward")


def test_a_leak_is_named(tmp_path: Path) -> None:
    found = replay_run(write(tmp_path, step(1, 50), ending=ENDING))

    assert (found.kind, found.leaks) == ("run-failure", (LEAK,))


def test_a_run_that_is_going_on_or_was_killed_says_so(tmp_path: Path) -> None:
    found = replay_run(write(tmp_path, step(1, 50), ending=None))

    assert (found.kind, found.reason) == ("run-peak", "")
    assert any("No ending is written" in note for note in found.notes)


def test_the_rank_that_ran_out_is_described(tmp_path: Path) -> None:
    done = replace(OUT, reason=Reason.DONE)
    write(tmp_path, step(1, 90), ending=done)
    write(tmp_path / "rank-1", step(1, 50), step(2, 60))

    found = replay_run(tmp_path)
    assert (found.rank, found.failed_step, found.kind) == (1, 3, "run-failure")


def test_snapshots_in_the_folder_are_named(tmp_path: Path) -> None:
    path = write(tmp_path) / "oom.pickle"
    path.touch()

    assert replay_run(tmp_path).snapshots == (str(path),)


def test_a_folder_of_snapshots_names_them(tmp_path: Path) -> None:
    for rank in range(5):
        (tmp_path / f"rank{rank}_memory_snapshot.pickle").touch()

    with pytest.raises(DataError, match=r"rank0_memory_snapshot\.pickle, .* and 2 more"):
        replay_run(tmp_path)


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no journal"):
        replay_run(tmp_path)
