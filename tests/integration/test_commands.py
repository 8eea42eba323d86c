"""The commands as a user types them: JSON with the documented names, one line for every fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memfit
from memfit.cli.main import main

SOURCE_FOLDER = Path(memfit.__path__[0]).parent

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


@pytest.fixture
def ask(capsys):
    """Return a function that runs a command in this process and reads its JSON."""

    def run(*words: str, exit_code: int = 0):
        assert main([*words, "--json"]) == exit_code
        shown = capsys.readouterr()
        assert shown.err == ""
        return json.loads(shown.out)

    return run


@pytest.fixture
def refuse(capsys):
    """Return a function that runs a command that must fail, and gives its one line."""

    def run(*words: str, exit_code: int) -> str:
        assert main(list(words)) == exit_code
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith("memfit: error: ")
        return line

    return run


def run_memfit(*words: str, **options) -> subprocess.CompletedProcess[str]:
    """Run memfit as its users do, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "memfit", *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE_FOLDER), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


# --- What is given ---


def test_a_prediction_has_the_documented_fields(ask, job):
    found = ask("predict", job)
    assert {name: type(found[name]) for name in STABLE} == STABLE
    assert found["fits"] is True, "the memory of the device is its budget"
    assert found["strategies"] == []
    assert sum(found["by_category"].values()) == found["peak_allocated_bytes"]
    assert sum(found["by_module"].values()) == found["peak_allocated_bytes"]
    assert "timeline" not in found
    assert {term["certainty"] for term in found["terms"]} <= {"exact", "table", "guess"}


def test_a_prediction_says_whether_it_fits_and_exits_with_three_if_not(ask, job):
    assert ask("predict", job, "--budget", "1GiB")["fits"] is True
    assert ask("predict", job, "--budget", "10KiB", exit_code=3)["fits"] is False


def test_the_budget_may_bound_the_process(ask, job):
    found = ask("predict", job, "--budget", "1MiB", "--budget-of", "process", exit_code=3)
    assert found["budget_of"] == "process"
    assert found["peak_allocated_bytes"] < 2**20 < found["process_bytes"]


def test_several_devices_are_predicted_in_one_go(ask, job):
    found = ask("predict", job, "--device", "t4", "--device", "a100-40gb", "--device", "cpu")
    assert [entry["device"] for entry in found] == ["t4", "a100-40gb", "cpu"]
    assert [entry["fits"] for entry in found] == [True, True, True]
    assert [entry["certainty"] == "exact" for entry in found] == [False, False, True]


def test_a_plan_has_the_documented_fields_and_says_what_else_was_tried(ask, job):
    plain = ask("predict", job)["peak_allocated_bytes"]
    found = ask("plan", job, "--budget", str(int(0.8 * plain)))
    assert {name: type(found[name]) for name in STABLE} == STABLE
    assert found["fits"] is True
    assert found["peak_allocated_bytes"] <= int(0.8 * plain) == found["budget_bytes"]
    assert all("name" in strategy for strategy in found["strategies"])
    assert sum(entry["chosen"] for entry in found["considered"]) == 1
    assert {entry["strategy"] for entry in found["refused"]} >= {"bf16", "loss-chunking"}
    assert all(entry["reason"] for entry in found["refused"])


def test_a_plan_carries_what_lies_around_it(ask, job):
    plain = ask("predict", job)["peak_allocated_bytes"]
    found = ask("plan", job, "--budget", str(int(0.8 * plain)))
    assert [set(point) for point in found["pareto"][:1]] == [
        {"strategies", "peak_bytes", "step_seconds", "is_recorded", "is_chosen"}
    ]
    assert [p["peak_bytes"] for p in found["pareto"] if p["is_chosen"]] == [
        found["peak_allocated_bytes"]
    ]
    rung = found["ladder"][0]
    assert all("name" in strategy for strategy in rung["strategies"])
    assert rung["numerics"] == "exact"
    assert rung["prediction"]["peak_allocated_bytes"] < found["peak_allocated_bytes"]
    assert {entry["strategy"] for entry in found["remedies"]} >= {"micro-batching", "bf16"}
    assert {frozenset(entry) for entry in found["remedies"]} == {
        frozenset({"strategy", "most_bytes", "is_recorded", "state"})
    }
    assert {entry["allow"] for entry in found["approximations"]} >= {"bf16", "pure-bf16"}
    assert set(found["approximations"][0]) == {"allow", "strategies", "peak_bytes", "step_seconds"}
    assert found["notes"] == []
    assert (found["host_bytes"], found["disk_bytes"]) == (0, 0)


def test_room_on_the_disk_opens_what_needs_it(ask, job):
    def reasons(*words: str) -> dict[str, str]:
        refused = ask("plan", job, "--budget", "1GiB", *words)["refused"]
        return {entry["strategy"]: entry["reason"] for entry in refused}

    assert "--disk SIZE" in reasons("--host-memory", "1GiB")["activation-offload"]
    assert "activation-offload" not in reasons("--disk", "1GiB")


def test_a_plan_may_be_chosen_by_running_it(ask, job):
    found = ask("plan", job, "--budget", "1GiB", "--measure")
    chosen = next(entry for entry in found["considered"] if entry["chosen"])
    assert found["step_seconds"] != chosen["step_seconds"], "a measured time, not the estimate"


def test_the_trade_of_memory_against_time_is_drawn(job, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need the plots extra")
    path = tmp_path / "pareto.png"
    assert main(["plan", job, "--budget", "1GiB", "--pareto", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"Wrote {path}." in capsys.readouterr().out.replace("\n", "")


def test_a_measurement_has_the_documented_fields_and_the_prediction_beside_it(ask, job):
    found = ask("measure", job)
    names = STABLE.keys() - {"by_module", "peak_reserved_bytes"}
    assert {name: type(found[name]) for name in names} == {name: STABLE[name] for name in names}
    assert found["peak_reserved_bytes"] is None, "the CPU allocator reserves nothing"
    assert found["predicted_peak_bytes"] == found["peak_allocated_bytes"]


def test_a_saved_plan_is_predicted_and_measured_as_it_was_planned(ask, job, tmp_path):
    plain = ask("predict", job)["peak_allocated_bytes"]
    path = str(tmp_path / "plan.yaml")
    words = ["--budget", str(int(0.8 * plain)), "--save", path, "--require", "micro-batching"]
    planned = ask("plan", job, *words)
    predicted = ask("predict", job, "--plan", path)
    measured = ask("measure", job, "--plan", path)
    assert "micro-batching" in {strategy["name"] for strategy in planned["strategies"]}
    assert predicted["peak_allocated_bytes"] == planned["peak_allocated_bytes"]
    assert predicted["strategies"] == measured["strategies"]
    assert measured["peak_allocated_bytes"] == pytest.approx(
        planned["peak_allocated_bytes"], rel=0.01
    )


def test_what_is_allowed_may_be_chosen_and_is_marked(ask, job):
    found = ask("plan", job, "--require", "bf16")
    assert found["numerics"] == "approximate"
    refused = {entry["strategy"] for entry in ask("plan", job, "--allow", "bf16")["refused"]}
    assert "bf16" not in refused


@pytest.mark.parametrize("words", [["predict"], ["plan", "--budget", "1GiB"], ["measure"]])
def test_tables_for_people_name_the_peak_and_fit_the_terminal(words, job, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([words[0], job, *words[1:]]) == 0
    shown = capsys.readouterr()
    assert "KiB" in shown.out
    assert shown.err == ""
    assert max(len(line) for line in shown.out.splitlines()) <= 80


def test_the_program_predicts_and_measures_without_a_word_on_standard_error(job):
    done = run_memfit("measure", job, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["predicted_peak_bytes"] == found["peak_allocated_bytes"]


# --- What is refused ---


def test_no_plan_fits_names_the_smallest_peak_and_what_holds_it_in_a_process_of_its_own(job):
    done = run_memfit("plan", job, "--budget", "10KiB")
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "memfit: error: No plan fits the budget of 10.0 KiB. The smallest peak reached is"
    )
    assert "parameters" in line
    assert "--allow bf16" in line


COMMANDS = ("predict", "plan", "measure")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_job_file_is_named(refuse, command):
    line = refuse(command, "no_such.py:job", exit_code=1)
    assert "no_such.py: there is no such file" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_job_is_named_with_those_that_are_there(refuse, command, job):
    line = refuse(command, job.replace(":job", ":jop"), exit_code=1)
    assert "no memfit.Job named 'jop'. The jobs there: job" in line


@pytest.mark.parametrize("command", ["predict", "plan"])
def test_an_unknown_device_is_named_with_near_ones(refuse, command, job):
    line = refuse(command, job, "--device", "rtx-3060", exit_code=2)
    assert "No device named 'rtx-3060'" in line
    assert "rtx-3060-12gb" in line


def test_a_device_that_is_not_here_cannot_be_measured(refuse, job):
    line = refuse("measure", job, "--device", "a100-40gb", exit_code=1)
    assert "a100-40gb is not in this machine" in line
    assert "--device cpu" in line


@pytest.mark.parametrize("command", ["predict", "plan"])
@pytest.mark.parametrize("budget", ["much", "0", "12 parsecs", "0GiB"])
def test_a_budget_that_is_no_size_is_refused(refuse, command, budget, job):
    line = refuse(command, job, "--budget", budget, exit_code=2)
    assert "budget" in line


@pytest.mark.parametrize("option", ["--host-memory", "--disk"])
def test_room_that_is_no_size_is_refused(refuse, option, job):
    assert "is not a size" in refuse("plan", job, option, "much", exit_code=2)


def test_plans_are_not_measured_for_a_device_that_is_not_here(refuse, job):
    line = refuse("plan", job, "--device", "a100-40gb", "--measure", exit_code=1)
    assert "a100-40gb is not in this machine" in line


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_search(refuse, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refuse("plan", "no_such.py:job", "--pareto", str(tmp_path / "p.png"), exit_code=1)
    assert "pip install 'memfit[plots]'" in line


@pytest.mark.parametrize("flag", ["--allow", "--require"])
def test_an_unknown_strategy_is_named_with_near_ones(refuse, flag, job):
    line = refuse("plan", job, flag, "bf-16", exit_code=2)
    assert "Strategy 'bf-16'" in line
    assert "Nearest: bf16" in line


def test_a_required_strategy_that_cannot_apply_is_refused_with_the_reason(refuse, job):
    line = refuse("plan", job, "--require", "batchnorm-replay", exit_code=1)
    assert "the model has no batch normalisation" in line


PLANS = {
    "absent": (None, "No such file"),
    "no yaml": ("memfit_plan: [", "it is no YAML"),
    "no plan": ("a: 1\n", "does not say memfit_plan: 1"),
    "unknown strategy": ("memfit_plan: 1\nstrategies: [{name: bf17}]\n", "Nearest: bf16"),
    "unknown setting": ("memfit_plan: 1\nstrategies: [{name: bf16, x: 1}]\n", "no setting x"),
    "wrong setting": (
        "memfit_plan: 1\nstrategies: [{name: micro-batching, micro_batch_size: 0}]\n",
        "at least 1, not 0",
    ),
}


@pytest.mark.parametrize("command", ["predict", "measure"])
@pytest.mark.parametrize("name", PLANS)
def test_a_bad_plan_file_is_refused_with_the_reason(refuse, command, name, job, tmp_path):
    content, reason = PLANS[name]
    path = tmp_path / "plan.yaml"
    if content is not None:
        path.write_text(content)
    line = refuse(command, job, "--plan", str(path), exit_code=1)
    assert f"Cannot read the plan file {path}" in line
    assert reason in line


@pytest.mark.parametrize("command", ["predict", "measure"])
def test_a_plan_that_cannot_apply_to_the_job_is_refused(refuse, command, job, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("memfit_plan: 1\nstrategies: [{name: batchnorm-replay, micro_batch_size: 2}]\n")
    line = refuse(command, job, "--plan", str(path), exit_code=1)
    assert "the model has no batch normalisation" in line


BODIES = {
    "model": "    return torch.nn.Sequential(*(Block(16) for _ in range(2)))\n",
    "batch": "    return torch.randn(batch_size, 20, 16)\n",
    "loss": "    return model(batch).square().mean()\n",
    "optimizer": "    return torch.optim.AdamW(parameters, lr=1e-3)\n",
}


def broken_job(tmp_path, function: str, body: str) -> str:
    """Write the job with another body for one of its functions."""
    path = tmp_path / "broken_job.py"
    assert BODIES[function] in JOB
    path.write_text(JOB.replace(BODIES[function], f"    {body}\n"))
    return f"{path}:job"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("function", BODIES)
def test_a_function_of_the_job_that_fails_is_named_in_one_line(refuse, command, function, tmp_path):
    body = "raise ValueError('it is\\nbroken')"
    line = refuse(command, broken_job(tmp_path, function, body), exit_code=1)
    assert "ValueError: it is broken" in line
    assert f"The job's {function} failed" in line


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("function", "body", "fragment"),
    [
        ("loss", "return model(batch)", "a tensor of shape (4, 20, 16)"),
        ("loss", "return 0.5", "a float"),
        ("batch", "return torch.randn(3, 20, 16)", "ignores its argument"),
        ("model", "return None", "it returned a NoneType"),
        ("optimizer", "return 3", "it returned a int"),
    ],
)
def test_a_function_of_the_job_that_gives_something_else_is_named(
    refuse, command, function, body, fragment, tmp_path
):
    assert fragment in refuse(command, broken_job(tmp_path, function, body), exit_code=1)


def test_a_job_file_that_fails_is_named_with_its_line(refuse, tmp_path):
    path = tmp_path / "failing.py"
    path.write_text("x = 1\nraise RuntimeError('no data here')\n")
    line = refuse("predict", f"{path}:job", exit_code=1)
    assert "RuntimeError: no data here (line 2)" in line


def test_words_that_are_no_arguments_are_refused_with_the_usage(job, capsys):
    for words in (["predict"], ["plan", job, "--budgets", "1GiB"], ["measure", job, job]):
        assert main(words) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "error:" in shown.err.splitlines()[-1]
        assert "Traceback" not in shown.err


def test_a_failing_program_shows_no_traceback_unless_it_is_wanted(refuse, tmp_path):
    job = broken_job(tmp_path, "loss", "return model(batch) @ batch")
    assert "The job's loss failed" in refuse("predict", job, exit_code=1)
    done = run_memfit("predict", job, "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_plan_that_cannot_be_saved_is_one_line(refuse, job, tmp_path):
    (tmp_path / "file").write_text("")
    refuse("plan", job, "--save", str(tmp_path / "file" / "plan.yaml"), exit_code=1)
