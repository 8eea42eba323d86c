"""A run of very many steps and events has a page that can be opened."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.reports.step_samples import TRAINING
from tests.zoo.processes import imports_after
from tests.zoo.run_records import CLIMBED, DRIFT, ENDING, FACTS, LEAK, OUT_OF_MEMORY, STEP

from memfit.journal.folder import JournalWriter
from memfit.reports.run_contents import read_report
from memfit.reports.run_page import run_html
from memfit.reports.run_plots import marked_steps
from memfit.reports.training import write_training


@pytest.mark.slow
def test_a_journal_of_very_many_events_gives_a_page_of_the_usual_size(tmp_path):
    writer = JournalWriter(tmp_path)
    writer.begin(FACTS)
    for number in range(1, 2001):
        writer.step(replace(STEP, step=number, time_seconds=number * 0.2))
    for number in range(12_000):
        kinds = (OUT_OF_MEMORY, CLIMBED, DRIFT, LEAK)
        event = replace(kinds[number % 4], step=1 + number // 6)
        writer.event(
            replace(event, holder=f"losses{number}") if event.step and number % 4 == 3 else event
        )
    writer.end(ENDING)
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"epoch": {n}, "loss": {1 + n % 97}}}\n' for n in range(1, 12_001))
    )
    write_training(tmp_path, TRAINING)
    page = run_html(read_report(tmp_path))
    assert len(page) < 2_000_000
    assert re.search(r"\d[\d,]+ more grow less; they are in events\.jsonl", page)
    assert "The last 500 of 12,000" in page
    (drawn,) = re.findall(r"out of memory \(([\d,]+)\)", page)
    (told,) = re.findall(r">([\d,]+) times<", page)
    (sent,) = re.findall(r'"name":"out of memory".*?"count":(\d+)', page)
    assert drawn == told == f"{int(sent):,}", "the picture, the figures and the chart agree"
    assert page.count('<div class="finding">') == 30
    assert "<summary>25 more</summary>" in page


@pytest.mark.slow
def test_a_report_leaves_torch_alone(tmp_path):
    writer = JournalWriter(tmp_path)
    writer.begin(FACTS)
    writer.step(STEP)
    writer.end(ENDING)
    code = f"from memfit.cli.main import main; main(['report', {str(tmp_path)!r}])"
    assert imports_after(code, "torch", "matplotlib") == {"matplotlib"}
    assert (tmp_path / "report.html").exists()


def test_of_many_marks_the_first_and_the_last_stay():
    assert marked_steps([3, 1, 3, 2]) == [1, 2, 3]
    marks = marked_steps(range(1, 100_001))
    assert len(marks) == 400
    assert (marks[0], marks[-1]) == (1, 100_000)
