"""What ``memfit plan`` leaves where no plan fits."""

from __future__ import annotations

import pathlib

import pytest

from memfit.cli.main import main
from memfit.errors import NoPlanFitsError
from memfit.job import load_job
from memfit.planner.planning import plan

pytestmark = pytest.mark.slow

_JOB = """
import torch

import memfit

job = memfit.Job(
    model=lambda: torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))),
    batch=lambda size: torch.ones(size, 32),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters),
    batch_size=64,
)
"""


@pytest.fixture
def job(tmp_path: pathlib.Path) -> str:
    (tmp_path / "job.py").write_text(_JOB)
    return f"{tmp_path / 'job.py'}:job"


def test_where_nothing_fits_the_page_and_the_picture_show_what_was_tried(job, tmp_path, capsys):
    pytest.importorskip("jinja2", reason="pages need the html extra")
    pytest.importorskip("matplotlib", reason="pictures need the plots extra")
    page, picture, saved = (tmp_path / name for name in ("plan.html", "plan.png", "plan.yaml"))
    files = ("--html", str(page), "--pareto", str(picture), "--save", str(saved))
    words = ("plan", job, "--budget", "6KiB", "--processes", "1", "--no-cache", *files)
    assert main(words) == NoPlanFitsError.exit_code
    shown = capsys.readouterr()
    assert f"Wrote {page}, of what was tried." in shown.out.replace("\n", "")
    assert "No plan fits the budget of 6.0 KiB" in shown.err
    text = page.read_text("utf-8")
    assert "Does not fit the budget of 6.0 KiB" in text
    assert "Smallest plan" in text
    assert ">smallest</span>" in text
    assert "the smallest that was reached" in text
    assert ">chosen</span>" not in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not saved.exists()


def test_the_smallest_plan_is_what_the_message_names(job):
    with pytest.raises(NoPlanFitsError) as caught:
        plan(load_job(job), budget="6KiB")
    error = caught.value
    smallest = error.smallest_plan()
    assert smallest.prediction.fits is False
    assert smallest.prediction.bounded_bytes() == error.smallest_peak_bytes
    assert tuple(smallest.labels()) == error.strategies
    assert not smallest.ladder
    assert [each.chosen for each in smallest.considered].count(True) == 1


def test_an_error_of_ranks_describes_no_plan(job):
    with pytest.raises(NoPlanFitsError) as caught:
        plan(load_job(job), budget="3KiB", ranks=2)
    assert caught.value.smallest_plan is None
