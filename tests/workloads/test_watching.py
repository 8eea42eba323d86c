"""Flags that every system of `memfit train` has: dry runs, what is required, and what is shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.workloads.training import train_workload

from memfit.errors import UsageError
from memfit.figures import ConsideredPlan
from memfit_workloads.conve import train_epoch, train_model
from memfit_workloads.planned_memory import has_bfloat16, short_run_lines, slow_lines

CONVE = (
    *("--dataset", "nations", "--embedding-height", "4", "--embedding-width", "4"),
    *("--output-channels", "2", "--batch-size", "64", "--epochs", "1", "--eval-every", "1"),
)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a10-24gb", "cpu"])
def test_a_dry_run_plans_for_any_device_and_writes_nothing(device, tmp_path):
    folder = tmp_path / "run"
    result = train_workload("conve", (*CONVE, "--dry-run", "--device", device, "-o", folder))
    assert min(result["predicted_peak_bytes"], result["plain_peak_bytes"]) > 0
    assert result["measured_peak_bytes"] is None
    assert result["step_seconds"] > 0
    assert not folder.exists()


@pytest.mark.slow
def test_what_is_required_is_in_the_plan(tmp_path):
    words = (
        *CONVE,
        "--dry-run",
        "--no-gpu",
        "-o",
        tmp_path,
        "--require",
        "activation-checkpointing",
    )
    assert any(
        "activation-checkpointing" in each for each in train_workload("conve", words)["strategies"]
    )
    with pytest.raises(UsageError, match="--require"):
        train_workload("conve", (*words, "--plan", "plan.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "name"), [("t4", "fp16"), ("a10", "bf16"), ("cpu", "bf16")])
def test_mixed_precision_is_in_what_the_device_has(device, name, tmp_path):
    words = (*CONVE, "--dry-run", "--device", device, "-o", tmp_path, "--use-mixed-precision")
    assert name in train_workload("conve", words)["strategies"]
    assert has_bfloat16(device) == (name == "bf16")


@pytest.mark.slow
def test_steps_are_shown_in_tensorboard_and_leaks_looked_for(tmp_path):
    pytest.importorskip("tensorboard")
    board = tmp_path / "board"
    words = (*CONVE, "--no-gpu", "-o", tmp_path / "run", "--find-leaks", "--tensorboard", board)
    assert train_workload("conve", words)["measured_peak_bytes"]
    assert list(board.rglob("events.out.tfevents.*"))


@pytest.mark.slow
def test_the_functions_of_the_document_train_as_the_command_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = {
        "dataset": "nations", "embedding_height": 4, "embedding_width": 4, "output_channels": 2,
        "batch_size": 64, "num_epochs": 1, "eval_every": 1, "no_gpu": True, "random_seed": 3,
    }  # fmt: skip
    result = train_model(**told, output_dir="own", overwrite=False, allow=["bf16"])
    words = (*CONVE, "--no-gpu", "--random-seed", "3", "-o", "typed")
    assert result["metrics"] == train_workload("conve", words)["metrics"]
    assert (Path("own") / "final_model.pt").is_file()
    with pytest.raises(UsageError, match="no num_epoch:"):
        train_model(num_epoch=1)
    with pytest.raises(UsageError, match="invalid choice"):
        train_model(dataset="none")


def test_an_epoch_is_the_mean_of_its_steps():
    losses = iter((1.0, 3.0))
    run = SimpleNamespace(step=lambda batch: SimpleNamespace(loss=next(losses)))
    assert train_epoch(run, ["a", "b"]) == 2.0
    run = SimpleNamespace(step=lambda batch: SimpleNamespace(loss=float("nan")))
    with pytest.raises(Exception, match="loss is nan at batch 1"):
        train_epoch(run, ["a"])
    with pytest.raises(Exception, match="no batch"):
        train_epoch(run, [])


def test_a_plan_that_is_very_slow_is_warned_of_with_what_more_memory_buys():
    def considered(peak_bytes: int, step_seconds: float, *strategies: str) -> ConsideredPlan:
        return ConsideredPlan(
            strategies=strategies,
            numerics="exact",
            peak_bytes=peak_bytes,
            step_seconds=step_seconds,
            fits=False,
            chosen=False,
            reason="",
        )

    planned = SimpleNamespace(
        plain=SimpleNamespace(step_seconds=1.0),
        planned=SimpleNamespace(step_seconds=300.0),
        budget_bytes=2**30,
        considered=[considered(2**31, 1.0), considered(3 * 2**29, 40.0, "batchnorm-replay(8)")],
    )
    (line,) = slow_lines(planned)
    assert "300 times as long" in line
    assert "512.0 MiB more budget, 1.50 GiB in all" in line
    assert "batchnorm-replay(8), which takes 40.0 times" in line
    planned.planned.step_seconds = 9.0
    assert slow_lines(planned) == ()


@pytest.mark.parametrize(
    ("num_updates", "says"),
    [(0, "the gradient scaler skipped them all"), (1, "first one is predicted to take 1.0 MiB")],
)
def test_a_run_too_short_for_its_prediction_says_so(num_updates, says):
    peaks = SimpleNamespace(peak_allocated_bytes=2 * 2**20, first_step_peak_bytes=2**20)
    planned = SimpleNamespace(planned=peaks)
    (line,) = short_run_lines(planned, num_updates)
    assert says in line
    assert "2.0 MiB are of steps" in line
    assert short_run_lines(planned, 2) == ()
