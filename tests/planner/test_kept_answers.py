"""Questions that an earlier call has answered: the same words come again, without the job."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import warnings

import pytest

from memfit.cli.main import main
from memfit.errors import MemfitWarning
from memfit.planner.result.planning_result import PlanningResult

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="nothing is kept on Windows"),
]

_JOB = """
import os
import pathlib

import torch
from torch import nn

import memfit

fd = os.open(pathlib.Path(__file__).with_name("imports.txt"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(fd, b"+")
os.close(fd)

job = memfit.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)),
    batch=lambda size: torch.ones(size, 8),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters),
    batch_size=512,
)
"""
_NOTE = "An earlier call has found this plan; --no-cache looks for it again.\n"


class Asked:
    """Asks ``memfit plan`` about a small job, with a cache of its own."""

    def __init__(self, folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.file = folder / "asked_job.py"
        self.file.write_text(_JOB)
        os.utime(self.file, (1e9, 1e9))
        self._capsys = capsys

    def __call__(self, *words: str, budget: str = "200KiB") -> str:
        """Return what a command wrote to standard output."""
        command = ("plan", f"{self.file}:job", "--budget", budget, "--processes", "1", *words)
        assert main(command) == 0
        return self._capsys.readouterr().out

    @property
    def num_imports(self) -> int:
        """Count how often the job was imported."""
        return len((self.folder / "imports.txt").read_text())


@pytest.fixture
def ask(tmp_path, capsys, monkeypatch) -> Asked:
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "kept"))
    return Asked(tmp_path, capsys)


def test_the_same_words_give_the_same_without_the_job(ask, tmp_path):
    files = [tmp_path / name for name in ("plan.yaml", "plan.png", "plan.html")]
    words = ["--save", str(files[0]), "--pareto", str(files[1]), "--html", str(files[2])]
    first = ask(*words)
    contents = [each.read_bytes() for each in files]
    for each in files:
        each.unlink()
    assert ask(*words) == first + _NOTE
    assert [each.read_bytes() for each in files] == contents
    assert ask.num_imports == 1


def test_a_report_and_json_are_made_of_what_was_found(ask):
    found = json.loads(ask("--json"))
    assert json.loads(ask("--json")) == found
    assert ask().startswith("Fits the budget of 200.0 KiB")
    assert "Memory against time" in ask("--verbose")
    assert ask.num_imports == 1
    assert ask().removesuffix(_NOTE) == ask("--no-cache")
    assert ask.num_imports == 2


def test_another_width_is_laid_out_anew(ask, monkeypatch):
    usual = ask("--verbose")
    monkeypatch.setenv("COLUMNS", "50")
    narrow = ask("--verbose")
    assert max(map(len, usual.splitlines())) > 50 >= max(map(len, narrow.splitlines()[:-1]))
    assert ask.num_imports == 1


def test_a_smaller_budget_that_the_plan_fits_as_well_has_the_answer_of_a_first_call(ask):
    found = json.loads(ask("--json"))
    peak_bytes = found["peak_allocated_bytes"]
    again = json.loads(ask("--json", budget=f"{peak_bytes}B"))
    assert ask.num_imports == 2
    fresh = json.loads(ask("--json", "--no-cache", budget=f"{peak_bytes}B"))
    for answer in (again, fresh):
        for each in (
            answer,
            answer["prediction"],
            *(rung["prediction"] for rung in answer["ladder"]),
        ):
            each.pop("record_seconds")
    assert again == fresh


def test_a_budget_that_it_does_not_fit_is_looked_into(ask):
    found = json.loads(ask("--json"))
    smaller = json.loads(ask("--json", budget=f"{found['peak_allocated_bytes'] - 1}B"))
    assert smaller["peak_allocated_bytes"] < found["peak_allocated_bytes"]
    larger = json.loads(ask("--json", budget="300KiB"))
    assert larger["peak_allocated_bytes"] >= found["peak_allocated_bytes"]
    assert ask.num_imports == 3


def test_a_plan_that_is_known_to_fit_is_told_of_first(ask, capsys):
    found = json.loads(ask("--json"))
    rung = min(found["ladder"], key=lambda each: each["prediction"]["peak_allocated_bytes"])
    peak_bytes = rung["prediction"]["peak_allocated_bytes"]
    budget = f"{peak_bytes}B"
    assert peak_bytes < found["peak_allocated_bytes"]
    ask("--json")
    command = ("plan", f"{ask.file}:job", "--processes", "1", "--budget", budget)
    assert main(command) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("memfit: an earlier call has found a plan that fits in ")
    assert all(each["name"] in first for each in rung["strategies"])
    assert main((*command, "--forbid", "tiling")) == 0
    assert "earlier call has found" not in capsys.readouterr().err


def test_an_interrupted_search_falls_back_on_a_plan_that_is_known(ask, monkeypatch):
    found = json.loads(ask("--json"))
    rung = min(found["ladder"], key=lambda each: each["prediction"]["peak_allocated_bytes"])
    peak_bytes = rung["prediction"]["peak_allocated_bytes"]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.planner.search.search.starting_points", interrupted)
    taken = json.loads(ask("--json", budget=f"{peak_bytes}B"))
    assert taken["ended_early"]
    assert taken["fits"]
    assert taken["budget_bytes"] == taken["peak_allocated_bytes"] == peak_bytes
    for name in ("strategies", "numerics", "proof", "reasons"):
        assert taken[name] == rung[name]
    assert "interrupted" in taken["notes"][0]
    command = ("plan", f"{ask.file}:job", "--processes", "1", "--budget", f"{peak_bytes - 1}B")
    assert main(command) == 130


def test_other_wishes_are_another_question(ask):
    used = {each["name"] for each in json.loads(ask("--json"))["strategies"]}
    others = json.loads(ask("--json", "--forbid", min(used)))
    assert min(used) not in {each["name"] for each in others["strategies"]}
    assert ask.num_imports == 2


def test_what_is_edited_is_planned_anew(ask):
    first = ask()
    ask.file.write_text(_JOB.replace("64", "48"))
    os.utime(ask.file, (1e9, 1e9))
    assert ask() != first
    assert ask.num_imports == 2


@pytest.mark.skipif(sys.platform != "linux", reason="what is mapped is known on Linux")
def test_a_file_that_a_library_has_mapped_counts(ask):
    """Torch reads it without Python's open."""
    table = ask.folder / "table.bin"
    table.write_bytes(bytes(32))
    job = f"table = torch.from_file({str(table)!r}, size=8)\n\njob = memfit.Job("
    ask.file.write_text(_JOB.replace("job = memfit.Job(", job).replace("ones(size", "zeros(size"))
    for each in (ask.file, table):
        os.utime(each, (1e9, 1e9))
    first = ask()
    assert ask() == first + _NOTE
    table.write_bytes(bytes(31) + b"1")
    os.utime(table, (1e9, 1e9))
    assert ask() == first
    assert ask.num_imports == 2


def test_what_ended_early_or_with_a_warning_is_not_kept(ask, monkeypatch):
    assert json.loads(ask("--json", "--seconds", "0.001"))["ended_early"]
    assert not json.loads(ask("--json"))["ended_early"]
    assert ask.num_imports == 2
    save = PlanningResult.to_yaml

    def warned(self: PlanningResult) -> str:
        warnings.warn("look here", MemfitWarning, stacklevel=1)
        return save(self)

    monkeypatch.setattr(PlanningResult, "to_yaml", warned)
    words = ("--save", str(ask.folder / "plan.yaml"), "--forbid", "micro-batching")
    for _ in range(2):
        with pytest.warns(MemfitWarning):
            ask(*words)
    assert ask.num_imports == 4


def test_torch_is_not_needed(ask):
    ask("--json")
    script = f"""
import sys
from memfit.cli.main import main
assert main(["plan", {f"{ask.file}:job"!r}, "--budget", "200KiB", "--json"]) == 0
assert "torch" not in sys.modules
"""
    # The same interpreter sees other variables and modules when it runs tests.
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script], check=False, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr


def test_what_is_damaged_is_planned_anew(ask):
    first = ask()
    for each in (ask.folder / "kept").rglob("*.pickle"):
        each.write_bytes(b"spoilt")
    assert ask() == first
    assert ask.num_imports == 2


def test_what_is_asked_for_has_to_make_sense_every_time(ask):
    ask()
    for words in (["--seconds", "0"], ["--ranks", "none"]):
        assert main(["plan", f"{ask.file}:job", "--budget", "200KiB", *words]) == 2
    assert main(["plan", f"{ask.file}:job", "--budget", "0"]) == 2
