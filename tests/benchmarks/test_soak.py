"""A run of many steps grows by nothing, and one that is made to grow is found out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench_soak import MOST_GROWTH_BYTES, beyond, memory_of, side_by_side, soaked

LEAK = """
import sys
from memfit.journal import step_file
kept, add = [], step_file.StepFile.add
def leaking(self, record):
    kept.append([bytes(40_000)])
    add(self, record)
step_file.StepFile.add = leaking
from soak.guarded import main
main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""


@pytest.mark.slow
def test_two_thousand_steps_watched_and_guarded_stay_within_all_limits(tmp_path: Path) -> None:
    figures = soaked(tmp_path, 2000)
    busy = "the report took"  # on a busy machine, whose waits count
    assert [found for found in beyond(figures) if busy not in found] == []
    assert figures["runs"]["guarded"]["num_out_of_memory"] >= 2
    assert figures["runs"]["watched"]["num_lines"] == 2000


@pytest.mark.slow
def test_a_journal_that_keeps_what_it_writes_is_found_out(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LEAK, str(tmp_path / "guarded.jsonl"), "400", "100"]
    samples, _ = side_by_side({"guarded": [*words, str(tmp_path / "guarded")]}, tmp_path)
    run = memory_of(samples["guarded"], 100)
    assert run["resident_growth_bytes"] > MOST_GROWTH_BYTES
    assert run["objects_growth_bytes"] > MOST_GROWTH_BYTES
    assert len(beyond({"runs": {"guarded": run}})) == 2


def test_growth_is_from_a_step_to_the_end() -> None:
    samples = [
        {"step": n, "processor_seconds": n / 4, "resident_bytes": size, "python_blocks": 5}
        | {"objects_bytes": size if n % 2 == 0 else None}
        for n, size in ((1, 50), (2, 10), (3, 40), (4, 20))
    ]
    run = memory_of(samples, 2)
    assert (run["resident_growth_bytes"], run["objects_growth_bytes"]) == (10, 10)
    assert run["resident_highest_bytes"] == 40
    assert run["processor_step_seconds"] == 0.25


@pytest.mark.parametrize(
    ("figure", "value", "words"),
    [
        ("resident_growth_bytes", 6 * 2**20, "resident memory grew by 6.0 MiB"),
        ("most_journal_bytes", 3_000_000, "the journal took 3,000,000 bytes"),
        ("report_bytes", 2_500_000, "the report takes 2,500,000 bytes"),
        ("report_processor_seconds", 7.5, "the report took 7.5 s"),
    ],
)
def test_what_is_beyond_its_limit_is_said(figure: str, value: float, words: str) -> None:
    well = {"resident_growth_bytes": 0, "objects_growth_bytes": 0}
    assert beyond({"runs": {"guarded": well}}) == []
    assert beyond({"runs": {"guarded": {**well, figure: value}}}) == [f"guarded: {words}"]
