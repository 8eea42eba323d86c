"""Recordings that are kept between calls: they say the same, until something changes."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

import memfit
from memfit.cli.main import main
from memfit.devices.catalogue import load_device
from memfit.figures import Prediction
from memfit.job import load_job
from memfit.planner.cache import inputs
from memfit.planner.cache.recording_cache import RecordingCache, cache_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing is kept on Windows")

_JOB = """
import contextlib
import json
import pathlib

import torch
from torch import nn

import memfit

HERE = pathlib.Path(__file__).parent


def build_model():
    width = json.loads((HERE / "config.json").read_text())["width"]
    with contextlib.suppress(FileNotFoundError):
        json.loads((HERE / "override.json").read_text())
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
              for _ in range(3)]
    return nn.Sequential(*blocks)


job = memfit.Job(
    model=build_model,
    batch=lambda size: torch.randn(size, 64),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.Adam(parameters),
    batch_size=1024,
)
"""


@pytest.fixture
def job_file(tmp_path: pathlib.Path) -> pathlib.Path:
    """Write a job whose model reads a file."""
    (tmp_path / "one.json").write_text(json.dumps({"width": 64}))
    (tmp_path / "other.json").write_text(json.dumps({"width": 64, "depth": 3}))
    (tmp_path / "config.json").symlink_to("one.json")
    path = tmp_path / "cached_job.py"
    path.write_text(_JOB)
    for each in tmp_path.iterdir():
        os.utime(each, (1e9, 1e9))
    return path


def planned(
    job_file: pathlib.Path, budget: str | None = "6MiB", folder: str = "cache", **wanted
) -> tuple[memfit.Plan, RecordingCache]:
    """Plan as the command does, with a cache."""
    cache = RecordingCache(job_file.parent / folder, f"{job_file}:job", load_device("cpu"))
    with cache.used():
        job = load_job(f"{job_file}:job")
        return memfit.plan(job, "cpu", budget, cache=cache, **wanted), cache


def said(plan: memfit.Plan) -> object:
    """Return all that a plan says, but how long recording took, and the order of small frees."""
    quick = [dataclasses.replace(each, prediction=None) for each in plan.ladder]
    rungs = [_at_any_time(each.prediction) for each in plan.ladder]
    whole = dataclasses.replace(plan, prediction=None, ladder=())
    return whole, _at_any_time(plan.prediction), quick, rungs


def _at_any_time(prediction: Prediction) -> Prediction:
    return dataclasses.replace(prediction, record_seconds=0.0, timeline=None)


@pytest.mark.slow
def test_a_second_call_records_nothing_and_says_the_same(job_file, recorded):
    first, cache = planned(job_file)
    assert cache.num_found == 0
    num_recorded = len(recorded)
    assert num_recorded > 2
    again, cache = planned(job_file)
    assert len(recorded) == num_recorded
    assert cache.num_found > num_recorded
    assert said(again) == said(first)


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["9MiB", "5MiB", "3MiB"])
def test_another_budget_gives_what_it_gives_without_a_cache(job_file, recorded, budget):
    planned(job_file)
    recorded.clear()
    kept, _ = planned(job_file, budget)
    num_recorded = len(recorded)
    recorded.clear()
    fresh, _ = planned(job_file, budget, folder="other")
    assert said(kept) == said(fresh)
    assert num_recorded < len(recorded)


@pytest.mark.slow
def test_other_wishes_give_what_they_give_without_a_cache(job_file):
    planned(job_file)
    for wanted in ({"forbid": ["micro-batching"]}, {"allow": ["bf16"]}, {"prove": False}):
        kept, _ = planned(job_file, **wanted)
        fresh, _ = planned(job_file, folder=f"other-{'-'.join(wanted)}", **wanted)
        assert said(kept) == said(fresh)


def _edit_job(job_file: pathlib.Path) -> None:
    job_file.write_text(_JOB.replace("range(3)", "range(4)"))


def _edit_config(job_file: pathlib.Path) -> None:
    (job_file.parent / "config.json").write_text(json.dumps({"width": 64, "depth": 2}))


def _delete_config_and_write_it(job_file: pathlib.Path) -> None:
    path = job_file.parent / "config.json"
    path.unlink()
    path.write_text('{"width":   64}')


def _set_variable(_: pathlib.Path) -> None:
    os.environ["HIDDEN_SIZE"] = "5"


def _add_what_was_looked_for(job_file: pathlib.Path) -> None:
    (job_file.parent / "override.json").write_text("{}")


def _move_link(job_file: pathlib.Path) -> None:
    link = job_file.parent / "config.json"
    link.unlink()
    link.symlink_to("other.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *(_edit_job, _edit_config, _delete_config_and_write_it, _set_variable),
        *(_add_what_was_looked_for, _move_link),
    ],
)
def test_what_changed_is_recorded_again(
    job_file, recorded, change: Callable[[pathlib.Path], None], monkeypatch
):
    monkeypatch.setenv("HIDDEN_SIZE", "4")
    planned(job_file)
    recorded.clear()
    change(job_file)
    _, cache = planned(job_file)
    assert cache.num_found == 0
    assert recorded


@pytest.mark.slow
def test_a_file_that_is_edited_while_it_is_planned_keeps_nothing(job_file):
    """What was read is the old one, and what is there by then the new one."""

    def edit(label: str) -> None:
        if label == "as it is":
            _edit_job(job_file)

    planned(job_file, progress=edit)
    assert planned(job_file)[1].num_found == 0


@pytest.mark.slow
def test_another_version_of_a_package_counts_as_a_change(job_file, monkeypatch):
    planned(job_file)
    monkeypatch.setattr(inputs, "_installed", lambda: ["torch-99.dist-info"])
    assert planned(job_file)[1].num_found == 0


def test_what_is_known_on_a_machine_with_a_card_does_not_count_on_one_without(monkeypatch):
    assert inputs.surroundings() == inputs.surroundings()
    before = inputs.digest_of(inputs.surroundings())
    monkeypatch.setattr(inputs, "_cards", lambda: ["nvidia0"])
    assert inputs.digest_of(inputs.surroundings()) != before


@pytest.mark.slow
def test_variables_that_shells_change_do_not_count(job_file, monkeypatch):
    planned(job_file)
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setenv("SHLVL", "9")
    assert planned(job_file)[1].num_found > 0


def _kept_files(job_file: pathlib.Path) -> Iterator[pathlib.Path]:
    yield from (job_file.parent / "cache").rglob("*.pickle")


@pytest.mark.slow
def test_what_is_damaged_is_recorded_again(job_file):
    first, _ = planned(job_file)
    for number, path in enumerate(_kept_files(job_file)):
        path.write_bytes(path.read_bytes()[: 40 * number])
    again, cache = planned(job_file)
    assert cache.num_found == 0
    assert said(again) == said(first)


@pytest.mark.slow
def test_a_folder_that_others_may_write_to_is_not_used(job_file):
    folder = job_file.parent / "cache" / "recordings"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    planned(job_file)
    assert [*folder.iterdir()] == []


@pytest.mark.slow
def test_nothing_is_kept_where_nothing_can_be_written(job_file):
    (job_file.parent / "cache").write_text("a file")
    assert planned(job_file)[0].prediction.fits


@pytest.mark.slow
def test_only_one_process_uses_the_recordings_of_a_job_at_a_time(job_file):
    planned(job_file)
    other = RecordingCache(job_file.parent / "cache", f"{job_file}:job", load_device("cpu"))
    with other.used():
        assert planned(job_file)[1].num_found == 0
    assert planned(job_file)[1].num_found > 0


@pytest.mark.slow
def test_what_is_interrupted_keeps_what_it_has(job_file, recorded):
    def interrupt(label: str) -> None:
        if "micro-batching" in label:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        planned(job_file, "3MiB", progress=interrupt)
    num_recorded = len(recorded)
    assert num_recorded
    assert planned(job_file, "3MiB")[1].num_found >= num_recorded


@pytest.mark.slow
def test_what_nothing_says_the_inputs_of_is_not_believed(job_file):
    planned(job_file)
    for path in (job_file.parent / "cache").rglob("inputs.json"):
        path.unlink()
    assert planned(job_file)[1].num_found == 0


@pytest.mark.slow
def test_what_was_killed_has_kept_what_it_had(job_file):
    script = f"""
import os, pathlib, sys
sys.path[:] = {[str(pathlib.Path.cwd()), *sys.path]!r}  # what is installed counts as an input
from tests.planner.test_cache import planned
def kill(label):
    if "micro-batching" in label:
        os.kill(os.getpid(), 9)
planned(pathlib.Path({str(job_file)!r}), "3MiB", progress=kill)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    assert planned(job_file, "3MiB")[1].num_found > 1
    edited = json.dumps({"width": 64, "depth": 2})
    (job_file.parent / "config.json").write_text(edited)
    assert planned(job_file, "3MiB")[1].num_found == 0


@pytest.mark.slow
def test_the_oldest_make_room_unless_somebody_has_put_something_there(tmp_path, monkeypatch):
    def filled(number: int) -> pathlib.Path:
        monkeypatch.setenv("NUMBER", str(number))
        cache = RecordingCache(tmp_path, "a", load_device("cpu"), most_bytes=100_000)
        with cache.used():
            cache.put(os.urandom(60_000), "x")
        os.utime(cache._folder, (number, number))
        return cache._folder

    first = filled(1)
    foreign = [tmp_path / "recordings" / "notes.txt", first / "notes.txt"]
    for each in foreign:
        each.write_text("mine")
    os.utime(first, (1, 1))
    second = filled(2)
    assert [*map(pathlib.Path.exists, (first, second, *foreign))] == [True] * 4
    foreign[1].unlink()
    os.utime(first, (1, 1))
    third = filled(3)
    assert [*map(pathlib.Path.exists, (first, second, third))] == [False, False, True]
    assert foreign[0].exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MEMFIT_CACHE_DIR": "/a"}, pathlib.Path("/a")),
        ({"MEMFIT_CACHE_DIR": "", "XDG_CACHE_HOME": "/b"}, None),
        ({"XDG_CACHE_HOME": "/b"}, pathlib.Path("/b/memfit")),
        ({}, pathlib.Path.home() / ".cache" / "memfit"),
    ],
)
def test_where_recordings_are_kept(variables, expected):
    assert cache_folder(variables) == expected


@pytest.mark.slow
def test_the_command_keeps_recordings_and_says_so(job_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path / "kept"))
    command = ["plan", f"{job_file}:job", "--budget", "6MiB", "--processes", "1"]
    assert main(command) == 0
    assert "kept from earlier calls" not in capsys.readouterr().out
    other = [*command[:3], "4MiB", *command[4:]]
    assert main(other) == 0
    assert "recordings were kept from earlier calls" in capsys.readouterr().out
    assert main([*other, "--no-cache"]) == 0
    assert "kept from earlier calls" not in capsys.readouterr().out
