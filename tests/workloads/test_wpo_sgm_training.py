"""Training WPO-SGM: its outputs, one objective under every strategy, budgets, resuming, ranks."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.workloads.training import press_ctrl_c_in_step, train_workload
from tests.zoo.processes import run_python

from memfit.errors import MemfitError, NoPlanFitsError, UsageError
from memfit_workloads import workload_names
from memfit_workloads.wpo_sgm.checkpoints import load_mixture
from memfit_workloads.wpo_sgm.evaluation import (
    density_estimate,
    gaussian_negative_log_likelihood,
    memorisation,
    sliced_wasserstein,
    squared_mmd,
)
from memfit_workloads.wpo_sgm.memory_estimate import strategy_by_thresholds

SMALL = (
    *("--data", "8gaussians", "--train_kernel_size", "10", "--train_samples_size", "60"),
    *("--validation_samples_size", "20", "--test_samples_size", "20", "--niters", "6"),
    *("--batch_size", "8", "--lr", "0.01", "--hiddenunits", "8", "--depth", "2"),
    *("--eval_every", "3", "--num_generated", "30", "--no-gpu"),
)
AS_IT_IS = ("--strategy", "single_gpu")
"""What is trained without a search for a plan."""
GIB = 2**30


def train(*words: object, console: Console | None = None) -> dict[str, Any]:
    """Train a mixture, small."""
    return train_workload("wpo-sgm", (*SMALL, *words), console)


def losses(folder: Path) -> list[str]:
    return (folder / "loss_log.csv").read_text().splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    """Train with what the flags are by default."""
    return train("--save", tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole) -> Path:
    return Path(whole["run_folder"])


def same_training(found: Path, expected: Path) -> None:
    """Hold two runs to have the same steps, rates and, but for rounding, losses."""
    for ours, theirs in zip(losses(found)[1:], losses(expected)[1:], strict=True):
        our_step, our_loss, our_lr = map(float, ours.split(","))
        step, loss, lr = map(float, theirs.split(","))
        assert (our_step, our_lr) == (step, lr)
        assert our_loss == pytest.approx(loss, rel=1e-4)


@pytest.mark.slow
def test_a_run_writes_every_output_and_says_what_it_reached(whole, folder):
    assert "wpo-sgm" in workload_names()
    assert folder.parts[-2:] == ("strategy_auto", "centers_10")
    assert {path.name for path in folder.iterdir()} >= {
        "config.json", "centers.pth", "best_model.pth", "final_model.pth", "latest_checkpoint.pth", "loss_log.csv",
        "metrics.jsonl", "plan.yaml", "result.json", "training.log",
    }  # fmt: skip
    assert json.loads((folder / "result.json").read_text()) == whole
    assert whole["measured_peak_bytes"] > 0
    assert set(whole["metrics"]) >= {
        "test_nll", "gaussian_test_nll", "density_estimate_test_nll", "mmd_squared",
        "sliced_wasserstein", "distance_ratio",
    }  # fmt: skip
    lines = losses(folder)
    assert lines[0] == "step,loss,lr"
    assert len(lines) == 7
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [3, 6]
    mixture = load_mixture(folder)
    density = mixture.log_density(torch.zeros(1, 2))
    assert density.isfinite().all()


@pytest.mark.slow
def test_pictures_are_drawn_where_matplotlib_is_installed(folder):
    pytest.importorskip("matplotlib")
    for name in ("samples.png", "density.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--strategy", "single_gpu"),
        ("--strategy", "chunked", "--chunk_size", "3"),
        ("--strategy", "gradient_accumulation", "--accumulation_steps", "4"),
        ("--strategy", "gradient_accumulation", "--accumulation_steps", "99"),
        ("--strategy", "auto", "--auto_policy", "thresholds"),
    ],
)
def test_every_strategy_trains_the_same_objective(tmp_path, folder, words):
    same_training(Path(train("--save", tmp_path, *words)["run_folder"]), folder)


WIDE = (
    *("--data", "swissroll_6D_xy1", "--train_kernel_size", "60", "--precision", "softplus"),
    *("--niters", "2", "--hiddenunits", "4"),
)


@pytest.mark.slow
def test_a_budget_is_kept_by_streaming_over_the_centres(tmp_path):
    plain = train("--save", tmp_path / "plain", *WIDE)
    result = train("--save", tmp_path / "small", *WIDE, "--budget-fraction", "0.3")
    assert result["measured_peak_bytes"] <= result["budget_bytes"] < plain["plain_peak_bytes"]
    assert result["predicted_peak_bytes"] == pytest.approx(result["measured_peak_bytes"], rel=0.01)
    assert any(label.startswith("loss-chunking") for label in result["strategies"])
    with pytest.raises(NoPlanFitsError):
        train("--save", tmp_path / "none", "--budget", "1KiB")


@pytest.mark.slow
def test_a_chunk_that_does_not_fit_the_budget_is_refused_before_training(tmp_path):
    with pytest.raises(
        NoPlanFitsError, match=r"with loss-chunking\(50\).*so nothing else was tried"
    ):
        train(
            *("--save", tmp_path, *WIDE, "--strategy", "chunked", "--chunk_size", "50"),
            *("--budget-fraction", "0.3"),
        )


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["one_cycle", "reduce_on_plateau", "step"])
def test_an_interrupted_run_continues_exactly(tmp_path, monkeypatch, scheduler):
    words = ("--scheduler_type", scheduler, *AS_IT_IS)
    whole = Path(train("--save", tmp_path / "whole", *words)["run_folder"])
    with monkeypatch.context() as patched:
        press_ctrl_c_in_step(patched, 4)
        console = Console(record=True, width=200, file=io.StringIO())
        with pytest.raises(KeyboardInterrupt):
            train("--save", tmp_path / "cut", *words, console=console)
    assert "Interrupted after 4 steps" in console.export_text()
    cut = tmp_path / "cut" / whole.relative_to(tmp_path / "whole")
    assert not (cut / "final_model.pth").exists()
    with pytest.raises(UsageError, match="already holds a run"):
        train("--save", tmp_path / "cut", *words)
    with pytest.raises(UsageError, match="seed 42 there, 7 here"):
        train("--save", tmp_path / "cut", *words, "--resume", "--seed", 7)
    train("--save", tmp_path / "cut", *words, "--resume")
    assert losses(cut) == losses(whole)
    ours, theirs = (torch.load(path / "final_model.pth") for path in (cut, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_without_a_final_model(tmp_path):
    with pytest.raises(MemfitError, match="The loss is nan"):
        train(
            *("--save", tmp_path, "--lr", "1e36", "--grad_clip", "0"),
            *("--scheduler_type", "constant", *AS_IT_IS),
        )
    assert (tmp_path / "strategy_single_gpu" / "centers_10" / "config.json").exists()
    assert not (tmp_path / "strategy_single_gpu" / "centers_10" / "final_model.pth").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--train_kernel_size", "61"), "there are 60"),
        (("--chunk_size", "3"), "not auto"),
        (("--plan", "x.yaml", "--strategy", "chunked"), "--plan says how"),
        (("--data", "cifar10"), "--data_dir"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(tmp_path, words, what):
    with pytest.raises(UsageError, match=what):
        train("--save", tmp_path, *words)


def run_command(*words: object, ranks: int | None = None) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*(launcher if ranks else []), "-m", "memfit", "train", "wpo-sgm"]
    return run_python(*command, *SMALL, *map(str, words))


@pytest.mark.slow
def test_three_ranks_train_the_network_of_one(tmp_path, folder):
    words = ("--strategy", "model_parallel", "--num_ranks", 3, "--save", tmp_path)
    done = run_command(*words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["num_ranks"] == 3
    same_training(Path(result["run_folder"]), folder)


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_with_its_message(tmp_path):
    """Two ranks for one centre."""
    words = ("--strategy", "model_parallel", "--train_kernel_size", 1, "--save", tmp_path)
    done = run_command(*words, ranks=2)
    assert done.returncode != 0
    assert "1 centres for 2 ranks" in done.stderr


@pytest.mark.parametrize(
    ("need", "gpus", "strategy"),
    [
        (8, 1, "single_gpu"), (9, 1, "chunked"), (16, 1, "gradient_accumulation"),
        (20, 4, "model_parallel"), (25, 4, "gradient_accumulation"), (9, 0, "chunked"),
    ],
)  # fmt: skip
def test_the_documents_thresholds(need, gpus, strategy):
    assert strategy_by_thresholds(need * GIB, 10 * GIB, gpus) == strategy


def test_distances_between_distributions():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(600, 3, generator=generator) for _ in range(2))
    far = b + 2.0
    assert abs(squared_mmd(a, b)) < 0.01 < 0.1 < squared_mmd(a, far)
    assert sliced_wasserstein(a, b, generator) < 0.2
    assert sliced_wasserstein(a, far, generator) == pytest.approx(2.0, rel=0.1)
    copies = memorisation(a[:100], b[:100], a)
    assert copies["distance_ratio"] < 0.01
    assert memorisation(b[:300], b[300:], a)["distance_ratio"] == pytest.approx(1.0, abs=0.2)


@pytest.mark.slow
def test_likelihoods_of_simple_densities():
    generator = torch.Generator().manual_seed(0)
    train_part, validation, test = torch.randn(3, 4000, 2, generator=generator)
    entropy = 2 * 0.5 * (1 + torch.log(torch.tensor(2 * torch.pi)).item())
    assert gaussian_negative_log_likelihood(train_part, test) == pytest.approx(entropy, abs=0.05)
    estimate = density_estimate(train_part, validation, test)
    assert estimate["nll"] == pytest.approx(entropy, abs=0.08)
    assert 0.1 < estimate["bandwidth"] < 0.6
