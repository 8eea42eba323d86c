"""A journal that is written line by line is read back whole, also after a sudden end."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.zoo.run_records import CLIMBED, DRIFT, ENDING, FACTS, LEAK, OUT_OF_MEMORY, STEP

from memfit.errors import DataError, FullDiskError
from memfit.figures import Timeline
from memfit.journal.folder import JournalWriter, rank_folder, read_journal, read_ranks
from memfit.journal.records import StepRecord
from memfit.journal.timeline import StepTimeline, read_timeline, write_timeline


def test_everything_written_is_read(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.begin(FACTS)
    writer.step(STEP)
    for event in (OUT_OF_MEMORY, CLIMBED, LEAK, DRIFT):
        writer.event(event)
    writer.end(ENDING)
    journal = read_journal(tmp_path)
    assert (journal.facts, journal.steps, journal.ending) == (FACTS, (STEP,), ENDING)
    assert journal.events == (OUT_OF_MEMORY, CLIMBED, LEAK, DRIFT)


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
    for rank in (0, 10, 2):
        writer = JournalWriter(rank_folder(tmp_path, rank))
        writer.step(STEP)
        writer.close()
    assert [*read_ranks(tmp_path)] == [0, 2, 10]


def test_a_folder_without_a_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no journal"):
        read_journal(tmp_path)


def steps_in(folder: Path, *numbers: int) -> None:
    writer = JournalWriter(folder)
    for number in numbers:
        writer.step(StepRecord(step=number, time_seconds=1.0, step_seconds=0.1))
    writer.close()


@pytest.mark.parametrize(
    ("written", "read"),
    [((1, 2, 3, 2, 3, 4), [1, 2, 3, 4]), ((1, 2, 3, 1), [1]), ((5, 6), [5, 6])],
)
def test_of_steps_done_twice_the_later_ones_count(
    tmp_path: Path, written: tuple[int, ...], read: list[int]
) -> None:
    steps_in(tmp_path, *written)
    assert [record.step for record in read_journal(tmp_path).steps] == read


def test_what_another_version_wrote_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(
        '{"step": 1}\n[]\n{"step": 2, "time_seconds": 1, "step_seconds": 1, "colour": "red"}\n'
    )
    (tmp_path / "events.jsonl").write_text('{"event": "eclipse", "step": 1}\n{"step": 2}\n')
    journal = read_journal(tmp_path)
    assert [record.step for record in journal.steps] == [2]
    assert journal.events == ()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.json", '{"title": "x"}', "fields of RunFacts"),
        ("run.json", "{", "not JSON"),
        ("reason.json", '{"reason": "boredom"}', "'boredom' is not a valid Reason"),
        ("reason.json", "{}", "not a valid Reason"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"{name}: .*{words}"):
        read_journal(tmp_path)


def test_a_run_that_begins_forgets_how_an_earlier_one_ended(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.end(ENDING)
    JournalWriter(tmp_path).begin(FACTS)
    assert read_journal(tmp_path).ending is None


def test_the_folder_of_a_rank_that_never_wrote_is_passed_over(tmp_path: Path) -> None:
    steps_in(tmp_path, 1)
    (tmp_path / "rank-1").mkdir()
    assert sorted(read_ranks(tmp_path)) == [0]


TIMELINE = Timeline(
    allocated_bytes=[10, 30, 20],
    by_category={"parameters": [10, 10, 10], "temporaries": [0, 20, 10]},
    phases=[(0, "forward"), (2, "backward")],
)


@pytest.mark.parametrize("predicted", [None, TIMELINE])
def test_the_timeline_of_a_step_is_read_as_it_was_written(
    tmp_path: Path, predicted: Timeline | None
) -> None:
    timeline = StepTimeline(step=7, measured=TIMELINE, predicted=predicted)
    assert write_timeline(tmp_path, timeline).name == "timeline.json"
    assert read_timeline(tmp_path) == timeline


def test_a_long_timeline_is_thinned_and_keeps_its_peak(tmp_path: Path) -> None:
    totals = [1 + number % 97 for number in range(100_000)]
    totals[54_321] = 500
    long = Timeline(
        allocated_bytes=totals,
        by_category={"parameters": totals, "gradients": [0] * len(totals)},
        phases=[(0, "forward")],
    )
    path = write_timeline(tmp_path, StepTimeline(step=1, measured=long))
    found = read_timeline(tmp_path)
    assert found is not None
    assert max(found.measured.allocated_bytes) == 500
    assert len(found.measured.allocated_bytes) <= 4000
    assert list(found.measured.by_category) == ["parameters"], "what holds nothing is left out"
    assert path.stat().st_size < 100_000


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"memfit_timeline": 9}',
        '{"memfit_timeline": 1, "step": 1}',
        (
            '{"memfit_timeline": 1, "step": 1, "predicted": null, "measured": '
            '{"allocated_bytes": [1, 2], "by_category": {"parameters": [1]}, "phases": []}}'
        ),
        (
            '{"memfit_timeline": 1, "step": 1, "predicted": null, "measured": '
            '{"allocated_bytes": [1, 1e999], "by_category": {}, "phases": []}}'
        ),
    ],
)
def test_a_file_that_is_no_timeline_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "timeline.json").write_text(content)
    with pytest.raises(DataError, match=r"timeline\.json"):
        read_timeline(tmp_path)


def test_without_a_timeline_there_is_none(tmp_path: Path) -> None:
    assert read_timeline(tmp_path) is None


def test_ranks_are_read_where_the_first_left_nothing_and_other_folders_are_passed_over(
    tmp_path: Path,
) -> None:
    (tmp_path / "rank-x").mkdir()
    steps_in(tmp_path / "rank-x", 1)
    with pytest.raises(DataError, match="holds no journal"):
        read_ranks(tmp_path)
    steps_in(tmp_path / "rank-2", 1, 2)
    assert [*read_ranks(tmp_path)] == [2]


def test_a_line_that_found_no_room_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, real_write = JournalWriter(tmp_path), os.write
    writer.step(STEP)

    def write(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(file, data[:-19])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(FullDiskError, match="No space left"):
            writer.step(replace(STEP, step=STEP.step + 1))
    writer.step(replace(STEP, step=STEP.step + 2))
    steps = read_journal(tmp_path).steps
    assert [step.step for step in steps] == [STEP.step, STEP.step + 2]


def test_a_run_that_goes_on_after_a_cut_line_loses_none_of_its_own(tmp_path: Path) -> None:
    """The line of a process that was killed while it wrote has no end."""
    writer = JournalWriter(tmp_path)
    writer.step(STEP)
    writer.close()
    file = tmp_path / "steps.jsonl"
    file.write_text(file.read_text() + '{"step": 121, "time_sec')
    later = JournalWriter(tmp_path)
    for number in (1, 2):
        later.step(replace(STEP, step=STEP.step + number))
    steps = [step.step - STEP.step for step in read_journal(tmp_path).steps]
    assert steps == [0, 1, 2]


@pytest.mark.parametrize(
    "row",
    [
        '{"step": "2"',
        '{"step": 2.5',
        '{"step": NaN',
        '{"step": 1e400',
        '{"step": 9999999999999999999999999999999999',
        '{"step": null',
        '{"step": [2]',
        '{"step": true',
    ],
)
def test_a_step_whose_values_cannot_be_is_left_out(tmp_path: Path, row: str) -> None:
    writer = JournalWriter(tmp_path)
    writer.step(STEP)
    writer.close()
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write(f'{row}, "time_seconds": 1.0, "step_seconds": 0.1}}\n')
        file.write('{"step": 999, "time_seconds": 1, "step_seconds": 0.1, "of_a_later": "x"}\n')
    assert [step.step for step in read_journal(tmp_path).steps] == [STEP.step, 999]
