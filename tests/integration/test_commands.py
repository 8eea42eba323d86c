"""The commands as a user types them: JSON with the documented names, one line for every fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.zoo.processes import run_python

from memfit.cli.main import main

JOB = """
import torch
from memfit import Job


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def model():
    return torch.nn.Sequential(*(Block(16) for _ in range(2)))


def batch(batch_size):
    return torch.randn(batch_size, 20, 16)


def loss(model, batch):
    return model(batch).square().mean()


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


job = Job(model=model, batch=batch, loss=loss, optimizer=optimizer, batch_size=4)


def build():
    trained = model()
    return lambda: loss(trained, batch(4)).backward()


def step():
    loss(model(), batch(4)).backward()


def broken():
    raise AssertionError("Torch not compiled with CUDA enabled")


def train(learning_rate):
    return job
"""
STABLE = {
    "peak_allocated_bytes": int,
    "peak_reserved_bytes": int,
    "process_bytes": int,
    "step_seconds": float,
    "by_category": dict,
    "by_module": dict,
    "strategies": list,
    "numerics": str,
}


@pytest.fixture
def job(tmp_path) -> str:
    """Write a job file; give it as the words of a command."""
    path = tmp_path / "my_job.py"
    path.write_text(JOB)
    return f"{path}:job"


# --- What is given ---


@pytest.mark.slow
def test_a_prediction_has_the_documented_fields(ask, job):
    found = ask("predict", job)
    assert {name: type(found[name]) for name in STABLE} == STABLE
    assert found["fits"] is True, "the memory of the device is its budget"
    assert found["strategies"] == []
    assert sum(found["by_category"].values()) == found["peak_allocated_bytes"]
    assert sum(found["by_module"].values()) == found["peak_allocated_bytes"]
    assert "timeline" not in found
    assert {term["certainty"] for term in found["terms"]} <= {"exact", "table", "guess"}


@pytest.mark.slow
def test_a_prediction_says_whether_it_fits_and_exits_with_three_if_not(ask, job):
    assert ask("predict", job, "--budget", "1GiB")["fits"] is True
    assert ask("predict", job, "--budget", "10KiB", exit_code=3)["fits"] is False


@pytest.mark.slow
def test_the_budget_may_bound_the_process(ask, job):
    found = ask("predict", job, "--budget", "1MiB", "--budget-of", "process", exit_code=3)
    assert found["budget_of"] == "process"
    assert found["peak_allocated_bytes"] < 2**20 < found["process_bytes"]


@pytest.mark.slow
def test_several_devices_are_predicted_in_one_go(ask, job):
    found = ask("predict", job, "--device", "t4", "--device", "a100-40gb", "--device", "cpu")
    assert [entry["device"] for entry in found] == ["a100-40gb", "t4", "cpu"], "the fastest first"
    assert [entry["fits"] for entry in found] == [True, True, True]
    assert [entry["certainty"] == "exact" for entry in found] == [False, False, True]


@pytest.mark.slow
def test_a_plan_has_the_documented_fields_and_carries_what_lies_around_it(ask, job):
    plain = ask("predict", job)["peak_allocated_bytes"]
    found = ask("plan", job, "--budget", f"{int(0.8 * plain)}B")
    assert {name: type(found[name]) for name in STABLE} == STABLE
    assert found["fits"] is True
    assert found["peak_allocated_bytes"] <= int(0.8 * plain) == found["budget_bytes"]
    assert all("name" in strategy for strategy in found["strategies"])
    assert sum(entry["chosen"] for entry in found["considered"]) == 1
    assert {entry["strategy"] for entry in found["refused"]} >= {"bf16", "loss-chunking"}
    assert all(entry["reason"] for entry in found["refused"])
    assert [p["peak_bytes"] for p in found["pareto"] if p["is_chosen"]] == [
        found["peak_allocated_bytes"]
    ]
    rung = found["ladder"][0]
    assert all("name" in strategy for strategy in rung["strategies"])
    assert rung["numerics"] == "exact"
    assert rung["prediction"]["peak_allocated_bytes"] < found["peak_allocated_bytes"]
    assert {entry["strategy"] for entry in found["remedies"]} >= {"micro-batching", "bf16"}
    assert {entry["allow"] for entry in found["approximations"]} >= {"bf16", "pure-bf16"}
    # Whether this processor was calibrated is the machine's matter.
    assert all("`memfit calibrate --device cpu`" in note for note in found["notes"])
    assert (found["host_bytes"], found["disk_bytes"]) == (0, 0)


@pytest.mark.slow
def test_room_on_the_disk_opens_what_needs_it(ask, job):
    def reasons(*words: str) -> dict[str, str]:
        refused = ask("plan", job, "--budget", "1GiB", *words)["refused"]
        return {entry["strategy"]: entry["reason"] for entry in refused}

    assert "--disk SIZE" in reasons("--host-memory", "1GiB")["activation-offload"]
    assert "activation-offload" not in reasons("--disk", "1GiB")


@pytest.mark.slow
def test_a_plan_may_be_chosen_by_running_it(ask, job):
    found = ask("plan", job, "--budget", "1GiB", "--measure")
    chosen = next(entry for entry in found["considered"] if entry["chosen"])
    assert found["step_seconds"] != chosen["step_seconds"], "a measured time, not the estimate"


@pytest.mark.slow
def test_the_trade_of_memory_against_time_is_drawn(job, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need the plots extra")
    path = tmp_path / "pareto.png"
    assert main(["plan", job, "--budget", "1GiB", "--pareto", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"Wrote {path}." in capsys.readouterr().out.replace("\n", "")


@pytest.mark.slow
def test_a_measurement_has_the_documented_fields_and_the_prediction_beside_it(ask, job):
    found = ask("measure", job)
    names = STABLE.keys() - {"by_module", "peak_reserved_bytes"}
    assert {name: type(found[name]) for name in names} == {name: STABLE[name] for name in names}
    assert found["peak_reserved_bytes"] is None, "the CPU allocator reserves nothing"
    assert found["predicted_peak_bytes"] == found["peak_allocated_bytes"]


@pytest.mark.slow
def test_a_saved_plan_is_predicted_and_measured_as_it_was_planned(ask, job, tmp_path):
    plain = ask("predict", job)["peak_allocated_bytes"]
    path = str(tmp_path / "plan.yaml")
    words = ["--budget", f"{int(0.8 * plain)}B", "--save", path, "--require", "micro-batching"]
    planned = ask("plan", job, *words)
    predicted = ask("predict", job, "--plan", path)
    measured = ask("measure", job, "--plan", path)
    assert "micro-batching" in {strategy["name"] for strategy in planned["strategies"]}
    assert predicted["peak_allocated_bytes"] == planned["peak_allocated_bytes"]
    assert predicted["strategies"] == measured["strategies"]
    assert measured["peak_allocated_bytes"] == pytest.approx(
        planned["peak_allocated_bytes"], rel=0.01
    )


@pytest.mark.slow
def test_what_is_required_is_chosen_and_its_numerics_are_marked(ask, job):
    assert ask("plan", job, "--require", "bf16")["numerics"] == "approximate"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["predict"], ["plan", "--budget", "1GiB"], ["measure"]])
def test_tables_for_people_name_the_peak_and_fit_the_terminal(
    words, job, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    assert main([words[0], Path(job).name, *words[1:]]) == 0
    shown = capsys.readouterr()
    assert "KiB" in shown.out
    progress = [line.partition(" ms ")[0] for line in shown.err.splitlines()]
    assert words[0] == "plan" or not progress
    assert all(line.startswith("memfit: after ") for line in progress)
    assert max(len(line) for line in shown.out.splitlines()) <= 80
    assert len(shown.out.splitlines()) <= 24


@pytest.mark.slow
def test_the_program_predicts_and_measures_without_a_word_on_standard_error(job):
    done = run_python("-m", "memfit", "measure", job, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["predicted_peak_bytes"] == found["peak_allocated_bytes"]


# --- What is refused ---

NO_JOB = {
    "build": "my_job.py:build gives a function, as one that runs a step would be",
    "step": "my_job.py:step trains (line 40)",
    "broken": "raised AssertionError: Torch not compiled with CUDA enabled (line 44)",
    "train": "my_job.py:train needs an argument (learning_rate)",
}


@pytest.mark.parametrize("command", ["plan", "measure", "verify"])
@pytest.mark.parametrize("name", NO_JOB)
def test_what_gives_no_job_is_told_what_a_job_has_and_what_writes_one(
    refuse, job, tmp_path, monkeypatch, command, name
):
    monkeypatch.chdir(tmp_path)
    line = refuse(command, f"my_job.py:{name}")
    assert NO_JOB[name] in line
    assert "model, batch, loss and optimizer, as functions, and batch_size" in line
    assert "`memfit job my_job.py` writes one" in line
    assert f"`memfit predict my_job.py:{name}`" in line


BATCH_NORM_PLAN = "memfit_plan: 1\nstrategies: [{name: batchnorm-replay, micro_batch_size: 2}]\n"
REFUSED = [
    *((f"{command} no_such.py:job", 1, "no_such.py: there is no such file")
      for command in ("predict", "plan", "measure")),
    *((f"{command} my_job.py:jop", 1, "no memfit.Job named 'jop'. The jobs there: job")
      for command in ("predict", "plan", "measure")),
    *((f"{command} my_job.py:job --plan absent.yaml", 1, "Cannot read the plan file absent.yaml")
      for command in ("predict", "measure")),
    *((f"{command} my_job.py:job --plan plan.yaml", 1, "the model has no batch normalisation")
      for command in ("predict", "measure")),
    *((f"{command} my_job.py:job --device rtx-3060", 2, "rtx-3060-12gb")
      for command in ("predict", "plan")),
    *((f"{command} my_job.py:job --budget {budget}", 2, "budget")
      for command in ("predict", "plan") for budget in ("much", "0", "0GiB")),
    *((f"plan my_job.py:job {option} much", 2, "is not a size")
      for option in ("--host-memory", "--disk")),
    *((f"plan my_job.py:job {option} bf-16", 2, "Nearest: bf16")
      for option in ("--allow", "--require", "--forbid")),
    ("plan my_job.py:job --require batchnorm-replay", 1, "the model has no batch normalisation"),
    ("plan my_job.py:job --device a100-40gb --measure", 1, "a100-40gb is not in this machine"),
    ("measure my_job.py:job --device a100-40gb", 1, "a100-40gb is not in this machine"),
    ("plan my_job.py:job --save my_job.py/plan.yaml", 1, "my_job.py: Not a directory"),
    ("plan my_job.py:job --html .", 1, ".: Is a directory"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "exit_code", "fragment"), REFUSED)
def test_a_fault_is_one_line_with_its_exit_code(
    refuse, job, tmp_path, monkeypatch, words, exit_code, fragment
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(BATCH_NORM_PLAN)
    assert fragment in refuse(*words.split(), exit_code=exit_code)


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_search(refuse, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refuse("plan", f"{__file__}:job", "--pareto", str(tmp_path / "p.png"), exit_code=1)
    assert "pip install 'memfit[plots]'" in line
