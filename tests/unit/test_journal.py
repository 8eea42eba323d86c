"""A journal that is written line by line is read back whole, also after a sudden end."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.errors import DataError
from memfit.journal.folder import JournalWriter, rank_folder, read_journal, read_ranks
from memfit.journal.records import (
    DriftEvent,
    Ending,
    LeakEvent,
    OutOfMemoryEvent,
    Reason,
    RunFacts,
    StepRecord,
)

FACTS = RunFacts(
    title="t", command="c", device="cpu", started_at="2026-01-01T00:00:00+00:00", process_id=3
)
STEP = StepRecord(step=1, time_seconds=0.5, step_seconds=0.4, peak_allocated_bytes=12)
OUT_OF_MEMORY = OutOfMemoryEvent(
    step=2, phase="backward", cause="x", plan=(), next_plan=("tiling",), num_steps_repeated=0
)
LEAK = LeakEvent(
    step=3,
    kind="list",
    holder="losses",
    chain=("train.py: losses", "[7]"),
    source_line="train.py:12",
    growth_bytes_per_step=4.0,
    total_growth_bytes=40,
    num_steps=10,
    place="host",
    sentence="It grows.",
)
DRIFT = DriftEvent(
    step=4,
    predicted_bytes=1,
    measured_bytes=2,
    category="gradients",
    predicted_category_bytes=0,
    measured_category_bytes=1,
)
ENDING = Ending(
    reason=Reason.LEAK,
    ended_by="budget-exceeded",
    exit_code=1,
    sentence="s",
    remedy="r",
    leaks=(LEAK,),
)


def test_everything_written_is_read(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.begin(FACTS)
    writer.step(STEP)
    for event in (OUT_OF_MEMORY, LEAK, DRIFT):
        writer.event(event)
    writer.end(ENDING)
    journal = read_journal(tmp_path)
    assert (journal.facts, journal.steps, journal.ending) == (FACTS, (STEP,), ENDING)
    assert journal.events == (OUT_OF_MEMORY, LEAK, DRIFT)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.step(STEP)
    writer.close()
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 2, "time_sec')
    journal = read_journal(tmp_path)
    assert journal.steps == (STEP,)
    assert journal.ending is None


def test_ranks_have_their_own_folders(tmp_path: Path) -> None:
    for rank in (0, 1):
        writer = JournalWriter(rank_folder(tmp_path, rank))
        writer.step(STEP)
        writer.close()
    assert sorted(read_ranks(tmp_path)) == [0, 1]


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no journal"):
        read_journal(tmp_path)
