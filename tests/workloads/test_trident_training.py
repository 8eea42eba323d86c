"""Training as a whole: outputs, exact continuation, budgets, and runs that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.workloads.training import press_ctrl_c_in_step, train_workload

from memfit.errors import NoPlanFitsError, UsageError
from memfit_workloads.epochs import load_checkpoint

pytestmark = pytest.mark.slow
SMALL = (
    *("--synthetic", "--num-clips", "24", "--num-valid-clips", "8", "--num-test-clips", "8"),
    *("--num-frames", "8", "--height", "16", "--width", "16", "--no-gpu"),
)
PLAN = """memfit_plan: 1
strategies:
- {name: micro-batching, micro_batch_size: 2}
"""


def train(*words: object, console: Console | None = None) -> dict[str, Any]:
    return train_workload("trident", (*SMALL, *words), console)


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple[object, ...]:
    """Return flags of a plan, so that none has to be looked for."""
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(PLAN)
    return ("--plan", path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, planned) -> Path:
    """Return the folder of a run of two epochs that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train("--epochs", "2", *planned, "-o", folder)
    return folder


def assert_same_training(folder: Path, other: Path) -> None:
    """Hold two runs' final weights and optimizer states to be equal bit for bit."""
    ours, theirs = (load_checkpoint(path / "final_model.pt", "TRIDENT") for path in (folder, other))
    for key, value in ours["model_state_dict"].items():
        assert torch.equal(value, theirs["model_state_dict"][key]), key
    states = zip(
        ours["optimizer_state_dict"]["state"].values(),
        theirs["optimizer_state_dict"]["state"].values(),
        strict=True,
    )
    for our_state, their_state in states:
        assert all(torch.equal(our_state[key], their_state[key]) for key in our_state)
    assert ours["best_metric"] == theirs["best_metric"]


def test_a_run_writes_every_output_and_says_what_it_reached(whole):
    names = {path.name for path in whole.iterdir()}
    assert names >= {
        "config.json", "best_model.pt", "final_model.pt", "training_history.json", "plan.yaml",
        "test_results.json", "metrics.jsonl",
    }  # fmt: skip
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    predicted = pytest.approx(lines[-1]["predicted_peak_bytes"], rel=1e-3)
    assert lines[-1]["measured_peak_bytes"] == predicted
    config = json.loads((whole / "config.json").read_text())
    assert config["memory"]["strategies"][-1].startswith("micro-batching")
    test = json.loads((whole / "test_results.json").read_text())
    assert set(test["branches"]) == {"rgb", "infrared", "kinematics", "class"}


def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on_exactly(
    tmp_path, planned, whole, monkeypatch
):
    parts = tmp_path / "parts"
    with monkeypatch.context() as patch:
        press_ctrl_c_in_step(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            train("--epochs", "2", *planned, "-o", parts)
    assert not (parts / "final_model.pt").exists()
    train("--epochs", "2", *planned, "-o", parts, "--resume-from-checkpoint", "auto")
    assert_same_training(whole, parts)


def test_a_budget_that_nothing_fits_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(NoPlanFitsError):
        train("--budget", "100KiB", "-o", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_clips_of_one_kind_are_refused(tmp_path):
    with pytest.raises(UsageError, match="are events"):
        train("--num-test-clips", "2", "--data-seed", "4", "-o", tmp_path / "run")
