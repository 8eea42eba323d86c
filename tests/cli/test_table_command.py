"""``memfit table``: every place is recorded, shown, and stays when it is ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit.cli.main import main
from memfit.job import load_job
from memfit.prediction import recorded_table
from memfit.prediction.predict import predict

JOB = """
import torch
import memfit

def make_job(length=8):
    return memfit.Job(
        model=lambda: torch.nn.Linear(64, 64),
        batch=lambda size: torch.randn(size, length, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=16,
    )

def of_other_things():
    return lambda: None

job = make_job()
long_job = make_job(32)
"""
PLAN = """memfit_plan: 1
strategies:
- name: micro-batching
  micro_batch_size: 4
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    Path("plan.yaml").write_text(PLAN)
    return "job.py"


def cells_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return json.loads(capsys.readouterr().out)["cells"]


@pytest.mark.slow
def test_every_place_is_what_a_prediction_of_its_own_says(job: str, capsys) -> None:
    words = ["--batch-sizes", "16,32", "--set", "length=8,32", "--plan", "plan.yaml", "--json"]
    assert main(["table", f"{job}:make_job", *words]) == 0
    cells = cells_of(capsys)

    places = [(cell["plan"], cell["settings"]["length"], cell["batch_size"]) for cell in cells]
    assert places == [
        (plan, length, size)
        for plan in ("plain", "plan.yaml")
        for length in (8, 32)
        for size in (16, 32)
    ]
    own = predict(load_job(f"{job}:long_job")).peak_allocated_bytes
    assert cells[2]["peak_allocated_bytes"] == own
    peaks = [cell["peak_allocated_bytes"] for cell in cells]
    assert peaks[0] < peaks[1] < peaks[3]
    assert peaks[7] < peaks[3], "the plan takes less"
    assert all(cell["is_recorded"] and cell["fits"] for cell in cells)


@pytest.mark.slow
def test_a_page_opens_a_place_without_scripts(job: str, capsys) -> None:
    pytest.importorskip("jinja2")
    words = ["--batch-sizes", "16,4096", "--budget", "1MiB", "--html", "table.html"]
    assert main(["table", f"{job}:job", *words]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("1 of 2 fit. The largest batch is 16: ")
    assert "MiB over" in shown

    page = Path("table.html").read_text("utf-8")
    assert 'href="#place-1"' in page
    assert 'id="place-1"' in page
    assert "<script" not in page
    assert "saved activations" in page or "batch" in page


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("16,32", "2 of 2 fit. The largest batch is at least 32, the largest asked for: "),
        ("16,4096", "1 of 2 fit. The largest batch is 16: "),
    ],
)
def test_a_batch_is_the_largest_only_where_a_larger_one_does_not_fit(
    job: str, capsys, sizes, said
) -> None:
    assert main(["table", f"{job}:job", "--batch-sizes", sizes, "--budget", "1MiB"]) == 0
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.slow
def test_what_fits_nowhere_ends_with_3_and_what_fails_says_why(job: str, capsys) -> None:
    assert main(["table", f"{job}:job", "--budget", "1KiB"]) == 3
    assert "None of them fits." in capsys.readouterr().out
    Path("plan.yaml").write_text(PLAN.replace("micro-batching", "batchnorm-replay"))
    assert main(["table", f"{job}:job", "--plan", "plan.yaml", "--json"]) == 0
    plain, planned = cells_of(capsys)
    assert plain["is_recorded"]
    assert not planned["is_recorded"]
    assert planned["reason"]


def test_with_ctrl_c_what_is_there_is_shown(job: str, capsys, monkeypatch) -> None:
    real = recorded_table.record_briefly

    def ends(asked: Any, *words: Any, **options: Any) -> Any:
        if asked.batch_size == 32:
            raise KeyboardInterrupt
        return real(asked, *words, **options)

    monkeypatch.setattr(recorded_table, "record_briefly", ends)
    assert main(["table", f"{job}:job", "--batch-sizes", "8,32,64", "--json"]) == 130
    assert [cell["is_recorded"] for cell in cells_of(capsys)] == [True, False, False]
    assert main(["table", f"{job}:job", "--batch-sizes", "32"]) == 130


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["job.py:job", "--batch-sizes", "8,x"], "whole numbers of at least 1"),
        (["job.py:job", "--set", "length=8"], "Name such a function"),
        (["job.py:make_job", "--set", "lenght=8"], "It takes: length"),
        (["job.py:make_job", "--set", "length="], "NAME=VALUE"),
        (["job.py:of_other_things"], "whose batch size can be changed"),
    ],
)
def test_words_that_make_no_sense_are_refused(
    job: str, capsys, words: list[str], fragment: str
) -> None:
    assert main(["table", *words]) == 2
    assert fragment in capsys.readouterr().err
