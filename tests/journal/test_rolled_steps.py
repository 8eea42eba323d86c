"""The journal of a run of any length stays small, and tells the same of the run as a whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.zoo.run_records import FACTS, STEP

from memfit.errors import DataError, FullDiskError
from memfit.journal import lines, step_file
from memfit.journal.folder import JournalWriter, read_journal
from memfit.journal.records import StepRecord
from memfit.journal.step_file import StepFile, latest, read_steps, rolled_up
from memfit.reports.run_contents import read_report

MOST = 64


@pytest.fixture(autouse=True)
def few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a journal have few records, so that it is rolled up soon."""
    monkeypatch.setattr(step_file, "_MOST_AFTERWARDS", 3 * MOST // 4)
    monkeypatch.setattr(step_file, "MOST_RECORDS", MOST)


def step(number: int, **values: int | float | None) -> StepRecord:
    return replace(STEP, step=number, time_seconds=number / 2, **values)


def steps(begin: int, end: int) -> Iterator[StepRecord]:
    return (step(number, peak_allocated_bytes=1000 + number % 7) for number in range(begin, end))


def written(path: Path, records: Iterator[StepRecord]) -> tuple[StepRecord, ...]:
    file = StepFile(path)
    for record in records:
        file.add(record)
        assert len(path.read_bytes().splitlines()) <= MOST
    file.close()
    return read_steps(path)


@pytest.mark.slow
def test_a_file_of_very_many_steps_has_few_lines_and_counts_all(tmp_path: Path) -> None:
    read = written(tmp_path / "steps.jsonl", steps(1, 1001))
    assert sum(record.num_steps for record in read) == 1000
    assert read[0].first_step == 1
    assert [one.step + 1 for one in read[:-1]] == [one.first_step for one in read[1:]]
    assert read[-1] == step(1000, peak_allocated_bytes=1006)


def test_what_is_rolled_up_has_the_highest_peak_and_the_mean_time() -> None:
    records = [
        *(step(n, step_seconds=0.1, peak_allocated_bytes=5) for n in range(1, 2 * MOST)),
        step(2 * MOST, step_seconds=0.3, peak_allocated_bytes=9, predicted_peak_bytes=8),
        *(step(n, peak_allocated_bytes=None) for n in range(2 * MOST + 1, 4 * MOST + 1)),
    ]
    rolled = rolled_up(records)
    (highest,) = [record for record in rolled if record.peak_allocated_bytes == 9]
    assert (highest.step, highest.num_steps, highest.predicted_peak_bytes) == (2 * MOST, 8, 8)
    assert highest.step_seconds == pytest.approx((7 * 0.1 + 0.3) / 8)
    assert highest.time_seconds == records[2 * MOST - 1].time_seconds
    assert highest.num_samples == 8 * (STEP.num_samples or 0)
    assert rolled[-1].peak_allocated_bytes is None


def test_steps_of_few_are_left_alone() -> None:
    records = [*steps(1, MOST // 2 + 1)]
    assert rolled_up(records) == records


def test_numbers_with_gaps_are_rolled_up_as_well() -> None:
    assert len(rolled_up(step(1000 * n) for n in range(1, 1000))) <= MOST


def test_a_run_that_goes_on_from_within_what_was_rolled_up_counts_each_step_once() -> None:
    rolled = replace(step(16), num_steps=8)
    kept = latest([replace(step(8), num_steps=8), rolled, step(12), step(13)])
    assert [(one.first_step, one.step) for one in kept] == [(1, 8), (9, 11), (12, 12), (13, 13)]
    assert latest([rolled, step(1), step(2)]) == [step(1), step(2)]


def test_many_short_beginnings_anew_stay_few_lines(tmp_path: Path) -> None:
    anew = (record for _ in range(8) for record in steps(1, 50))
    assert [one.step for one in written(tmp_path / "steps.jsonl", anew)] == [*range(1, 50)]


def test_a_file_that_is_there_already_is_gone_on_with(tmp_path: Path) -> None:
    written(tmp_path / "steps.jsonl", steps(1, 51))
    read = written(tmp_path / "steps.jsonl", steps(51, 101))
    assert sum(record.num_steps for record in read) == 100


def test_lines_that_cannot_be_read_do_not_outlive_rolling_up(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 1, "time_sec\n\xff\n{"step": 1, "num_steps": 0}\n', "latin-1")
    read = written(path, steps(1, 2 * MOST))
    assert sum(record.num_steps for record in read) == 2 * MOST - 1


def test_a_disk_that_fills_up_while_steps_are_rolled_up_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "steps.jsonl"
    before = written(path, steps(1, MOST + 1))
    file = StepFile(path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FullDiskError):
        file.add(step(MOST + 1))
    assert read_steps(path) == before


def test_the_report_of_a_long_run_tells_of_all_of_it(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.begin(FACTS)
    for number in range(1, 1001):
        seconds = 0.5 if number <= 400 else 0.25
        writer.step(step(number, step_seconds=seconds, peak_allocated_bytes=number))
    writer.close()
    (rank,) = read_report(tmp_path).ranks
    assert (rank.num_steps, rank.last_step, rank.peak_allocated_bytes) == (1000, 1000, 1000)
    assert rank.median_step_seconds == 0.25
    assert len(read_journal(tmp_path).steps) < MOST


def test_a_journal_larger_than_any_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MOST_FILE_BYTES", 1000)
    (tmp_path / "steps.jsonl").write_text("{}\n" * 400)
    with pytest.raises(DataError, match=r"steps\.jsonl: it is larger than 1,000 bytes; [^\n]+$"):
        read_journal(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "reason.json", "timeline.json"])
def test_so_is_a_file_that_is_written_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / "steps.jsonl").write_text("{}\n")
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**33)
    if name == "timeline.json":
        (note,) = read_report(tmp_path).notes
    else:
        with pytest.raises(DataError) as found:
            read_report(tmp_path)
        note = str(found.value)
    assert "it is larger than 4,194,304 bytes" in note
    assert "\n" not in note
