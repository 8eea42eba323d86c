"""Training as a whole: outputs, exact continuation, budgets, and runs that fail."""

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.workloads.training import press_ctrl_c_in_step, train_workload

from memfit.errors import DataError, MemfitError, NoPlanFitsError, UsageError
from memfit.reports.training import read_training
from memfit_workloads import load_workload, loop, workload_names
from memfit_workloads import train as workload_training
from memfit_workloads.checkpoint_files import save_checkpoint
from memfit_workloads.conve import batches
from memfit_workloads.conve.checkpoints import load_model
from memfit_workloads.conve.train import ConvETraining
from memfit_workloads.epochs import load_checkpoint, newest_checkpoint

SMALL = (
    *("--embedding-height", "4", "--embedding-width", "6", "--output-channels", "4"),
    *("--batch-size", "16", "--learning-rate", "0.01", "--eval-every", "2", "--no-gpu"),
    *("--learning-rate-decay", "0.9"),
)

# Large enough for feature maps to hold the peak.
LARGE = (
    *("--embedding-height", "10", "--embedding-width", "20", "--output-channels", "32"),
    *("--batch-size", "32", "--epochs", "2"),
)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Write a small graph with a rule to learn, and return a function that trains ConvE on it."""
    draw = random.Random(0)
    lines = {f"e{i}\tnext\te{(i + 1) % 20}" for i in range(20)}
    lines |= {f"e{draw.randrange(20)}\tlikes\te{draw.randrange(20)}" for _ in range(60)}
    shuffled = sorted(lines)
    draw.shuffle(shuffled)
    parts = {"train": shuffled[16:], "valid": shuffled[:8], "test": shuffled[8:16]}
    flags, folder = list(SMALL), tmp_path_factory.mktemp("graph")
    for name, part in parts.items():
        path = folder / f"{name}.txt"
        path.write_text("\n".join(part) + "\n")
        flags += [f"--{name}", str(path)]

    def run(*words: object, console: Console | None = None) -> dict[str, Any]:
        return train_workload("conve", (*flags, *words), console)

    return run


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory) -> Path:
    """Return the folder of a run of six epochs that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    train("--epochs", "6", "-o", folder)
    return folder


def assert_same_training(folder: Path, other: Path) -> None:
    """Hold two runs' final weights, optimizer states and histories to be equal bit for bit."""
    ours, theirs = (load_checkpoint(path / "final_model.pt", "ConvE") for path in (folder, other))
    for key, value in ours["model_state_dict"].items():
        assert torch.equal(value, theirs["model_state_dict"][key]), key
    states = zip(
        ours["optimizer_state_dict"]["state"].values(),
        theirs["optimizer_state_dict"]["state"].values(),
        strict=True,
    )
    for our_state, their_state in states:
        assert all(torch.equal(our_state[key], their_state[key]) for key in our_state)
    losses = [[line["loss"] for line in run["training_state"]["history"]] for run in (ours, theirs)]
    assert losses[0] == losses[1]
    assert ours["best_metric"] == theirs["best_metric"]


def test_conve_is_among_the_workloads():
    assert "conve" in workload_names()
    with pytest.raises(UsageError, match="No workload named 'nope'"):
        load_workload("nope")


@pytest.mark.slow
def test_a_run_writes_every_output_and_says_what_it_reached(tmp_path, train):
    out = tmp_path / "run"
    result = train("--epochs", "4", "-o", out)
    names = {path.name for path in out.iterdir()}
    assert names >= {
        "config.json", "best_model.pt", "final_model.pt", "training_history.json", "plan.yaml",
        "test_results.json", "metrics.jsonl", "entity_to_id.txt", "relation_to_id.txt",
    }  # fmt: skip
    assert {path.name for path in (out / "checkpoints").iterdir()} == {
        "checkpoint_epoch_2.pt", "checkpoint_epoch_4.pt",
    }  # fmt: skip
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["measured_peak_bytes"] > 0
    assert result["predicted_peak_bytes"] <= result["plain_peak_bytes"]
    assert result["run_folder"] == str(out)
    assert result["numerics"] == "exact"
    test = json.loads((out / "test_results.json").read_text())
    assert test["both"]["mrr"] == result["metrics"]["test_mrr"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4]
    assert [line["valid_mrr"] is None for line in lines] == [True, False, True, False]
    assert lines == json.loads((out / "training_history.json").read_text())
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.slow
def test_the_configuration_says_what_was_asked_for_and_done(tmp_path, train):
    out = tmp_path / "run"
    flags = ("--use-mixed-precision", "--use-gradient-checkpointing", "--disable-memory-cleanup")
    result = train("--epochs", "1", "-o", out, *flags)
    config = json.loads((out / "config.json").read_text())
    assert set(config) == {"data", "model", "training", "optimizations"}
    done = config["optimizations"]
    assert done["use_mixed_precision"]
    assert done["use_gradient_checkpointing"]
    assert not done["enable_memory_cleanup"]
    assert done["strategies"] == result["strategies"]
    assert config["data"]["num_entities"] == 20


@pytest.mark.slow
def test_the_flags_for_precision_and_checkpointing_change_how_training_is_carried_out(
    tmp_path, train
):
    flags = {
        "--use-mixed-precision": ("bf16", "approximate"),
        "--use-gradient-checkpointing": ("activation-checkpointing", "exact"),
    }
    for flag, (strategy, numerics) in flags.items():
        result = train(*LARGE, "-o", tmp_path / strategy, flag)
        assert any(label.startswith(strategy) for label in result["strategies"])
        assert result["numerics"] == numerics
        assert result["predicted_peak_bytes"] < result["plain_peak_bytes"]
        measured = result["measured_peak_bytes"]
        assert measured == pytest.approx(result["predicted_peak_bytes"], rel=0.02)


@pytest.mark.slow
def test_checkpoints_hold_all_that_rebuilds_the_model(tmp_path, train):
    out = tmp_path / "run"
    words = ("--epochs", "1", "--kernel-height", "2", "--output-dropout", "0.05", "-o", out)
    train(*words)
    saved = load_checkpoint(out / "final_model.pt", "ConvE")
    assert set(saved) >= {
        "epoch", "model_state_dict", "optimizer_state_dict", "model_config", "metrics", "scaler",
        "random_state", "best_metric", "order_state",
    }  # fmt: skip
    model = load_model(out / "final_model.pt")
    assert model.sizes.kernel_height == 2
    assert model.sizes.output_dropout == 0.05
    assert model.sizes.output_channels == 4
    assert torch.equal(model.entity_bias, saved["model_state_dict"]["entity_bias"])


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, train, whole):
    parts = tmp_path / "parts"
    train("--epochs", "2", "-o", parts)
    path = parts / "checkpoints/checkpoint_epoch_2.pt"
    torch.manual_seed(999)
    train("--epochs", "6", "-o", parts, "--resume-from-checkpoint", path)
    assert_same_training(whole, parts)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4, 9, 12])
def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on_exactly(
    tmp_path, train, whole, monkeypatch, step
):
    parts = tmp_path / "parts"
    with monkeypatch.context() as patch:
        press_ctrl_c_in_step(patch, step)
        with pytest.raises(KeyboardInterrupt):
            train("--epochs", "6", "-o", parts)
    assert not (parts / "final_model.pt").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train("--epochs", "6", "-o", parts, "--resume-from-checkpoint", "auto")
    assert_same_training(whole, parts)
    assert not (parts / "checkpoints/checkpoint_interrupted.pt").exists()


@pytest.mark.slow
def test_ctrl_c_says_what_to_type_to_go_on(tmp_path, train, monkeypatch, capsys):
    press_ctrl_c_in_step(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train("-o", tmp_path / "run", console=Console())
    printed = capsys.readouterr().out
    assert "after 3 steps" in printed
    assert "memfit train conve --train" in printed
    assert "--resume-from-checkpoint auto" in printed


@pytest.mark.slow
def test_pairs_of_answers_train_the_same_weights_as_padded_lists(tmp_path, train, monkeypatch):
    flags = ("--epochs", "1", "-o")  # from the second on rows may be in other batches
    train(*flags, tmp_path / "padded")
    monkeypatch.setattr(batches, "_MOST_PADDED_BYTES", 0)
    result = train(*flags, tmp_path / "pairs")
    ours, theirs = (
        load_checkpoint(tmp_path / name / "final_model.pt", "ConvE") for name in ("padded", "pairs")
    )
    for key, value in ours["model_state_dict"].items():
        torch.testing.assert_close(value, theirs["model_state_dict"][key], rtol=1e-4, atol=1e-5)
    assert result["measured_peak_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.01)


@pytest.mark.slow
def test_long_steps_are_not_run_once_more_for_the_report(tmp_path, train, monkeypatch):
    monkeypatch.setattr(workload_training, "_LONG_STEP_SECONDS", 0.0)
    result = train("--epochs", "1", "-o", tmp_path)
    found = read_training(tmp_path)
    assert found is not None
    assert found.measured is None
    assert found.found_bytes == result["measured_peak_bytes"]
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
def test_training_may_end_within_an_epoch(tmp_path, train, capsys):
    result = train("--epochs", "6", "--max-steps", "2", "-o", tmp_path)
    history = json.loads((tmp_path / "training_history.json").read_text())
    assert [line["num_steps"] for line in history] == [2]
    assert history[0]["valid_mrr"] is not None
    assert result["metrics"]["loss"] == history[0]["loss"]
    assert (tmp_path / "final_model.pt").is_file()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_its_last_steps(tmp_path, train, whole, monkeypatch):
    class KilledError(Exception):
        """In the place of a signal that nothing can catch."""

    def killed(system: object) -> None:
        raise KilledError

    flags = ("--epochs", "6", "--checkpoint-steps", "3", "-o", tmp_path)
    with monkeypatch.context() as patch:
        written = ConvETraining.save_interrupted

        def save(self: ConvETraining) -> Path:
            path = written(self)
            if self.state.num_steps >= 3:
                patch.setattr(loop, "_step", killed)
            return path

        patch.setattr(ConvETraining, "save_interrupted", save)
        with pytest.raises(KilledError):
            train(*flags)
    (found,) = (tmp_path / "checkpoints").iterdir()
    assert load_checkpoint(found, "ConvE")["steps_done"] == 3
    train(*flags, "--resume-from-checkpoint", "auto")
    assert_same_training(tmp_path, whole)
    assert not found.exists()


@pytest.mark.slow
def test_auto_passes_over_a_checkpoint_that_was_cut_off(tmp_path, train, whole, capsys):
    parts = tmp_path / "parts"
    train("--epochs", "4", "-o", parts)
    newest = parts / "checkpoints/checkpoint_epoch_4.pt"
    newest.write_bytes(newest.read_bytes()[:2000])
    words = ("--epochs", "6", "-o", parts, "--resume-from-checkpoint", "auto")
    train(*words, console=Console(width=300))
    printed = capsys.readouterr().out
    assert "Passed over" in printed
    assert "checkpoint_epoch_2.pt: 2 epochs done" in printed
    assert_same_training(whole, parts)


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 cut"])
def test_a_file_that_is_no_checkpoint_is_a_data_error(tmp_path, content):
    path = tmp_path / "checkpoint_epoch_1.pt"
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        load_checkpoint(path, "ConvE")
    with pytest.raises(DataError, match="no checkpoint there can be read"):
        newest_checkpoint(tmp_path, "ConvE")
    torch.save({"epoch": 1}, path)
    with pytest.raises(DataError, match="no model_state_dict"):
        load_checkpoint(path, "ConvE")


def test_writing_a_checkpoint_that_fails_leaves_the_earlier_one(tmp_path):
    path = tmp_path / "checkpoint_epoch_1.pt"
    save_checkpoint(path, {"epoch": 1})
    with pytest.raises((AttributeError, TypeError)):
        save_checkpoint(path, {"epoch": lambda: None})
    assert torch.load(path)["epoch"] == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_by_what_differs(tmp_path, train):
    out = tmp_path / "run"
    train("--epochs", "1", "-o", out)
    words = ("--output-channels", "6", "-o", out, "--resume-from-checkpoint", "auto")
    with pytest.raises(UsageError, match="output_channels 4 there, 6 here"):
        train(*words)
    assert (out / "final_model.pt").exists()


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_overwritten_unasked(tmp_path, train):
    out = tmp_path / "run"
    train("--epochs", "2", "-o", out)
    with pytest.raises(UsageError, match="already holds a run"):
        train("--epochs", "1", "-o", out)
    train("--epochs", "1", "-o", out, "--overwrite")
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["checkpoint_epoch_1.pt"]


@pytest.mark.slow
def test_a_folder_that_holds_the_journal_of_another_run_is_not_overwritten_either(tmp_path, train):
    out = tmp_path / "run"
    out.mkdir()
    (out / "steps.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"run already holds a run \(steps\.jsonl\).*--overwrite"):
        train("--epochs", "1", "-o", out)
    assert (out / "steps.jsonl").read_text() == "{}\n"


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run_and_writes_no_final_model(tmp_path, train):
    out = tmp_path / "run"
    with pytest.raises(MemfitError, match=r"loss is (nan|inf) in epoch \d+, step \d+"):
        train("--epochs", "4", "-o", out, "--learning-rate", "1e36")
    assert not (out / "final_model.pt").exists()
    assert not (out / "best_model.pt").exists()


@pytest.mark.slow
def test_training_stops_when_validation_no_longer_improves(tmp_path, train):
    words = ("--epochs", "30", "--eval-every", "1", "--early-stopping-patience", "2")
    result = train(*words, "-o", tmp_path / "run", "--learning-rate", "1e-12")
    assert result["num_epochs"] < 30
    assert result["num_epochs"] == result["best_epoch"] + 2
    assert (tmp_path / "run/final_model.pt").exists()
    assert (tmp_path / f"run/checkpoints/checkpoint_epoch_{result['num_epochs']}.pt").exists()


@pytest.mark.slow
def test_the_test_triples_are_ranked_with_the_best_validated_weights(tmp_path, train):
    out = tmp_path / "run"
    result = train("--epochs", "12", "--eval-every", "1", "-o", out)
    assert result["test"]["epoch"] == result["best_epoch"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert max(line["valid_mrr"] for line in lines) == result["metrics"]["valid_mrr"]


@pytest.mark.slow
def test_single_targets_train_on_every_triple_of_its_own(tmp_path, train):
    result = train("--epochs", "1", "--training-target", "single", "-o", tmp_path / "run")
    assert result["metrics"]["test_mrr"] > 0


@pytest.mark.slow
def test_a_budget_is_kept_without_changing_the_results_or_splitting_normalised_batches(
    tmp_path, train
):
    dropouts = ("--input-dropout", "--feature-map-dropout", "--output-dropout")
    without_dropout = [word for flag in dropouts for word in (flag, "0")]
    words = (*LARGE, *without_dropout)
    plain = train(*words, "-o", tmp_path / "plain")
    planned = train(*words, "-o", tmp_path / "planned", "--budget-fraction", "0.85")
    assert planned["budget_bytes"] == int(0.85 * plain["plain_peak_bytes"])
    assert planned["predicted_peak_bytes"] <= planned["budget_bytes"]
    assert planned["measured_peak_bytes"] <= 1.01 * planned["budget_bytes"]
    assert planned["strategies"]
    assert not any("micro-batching" in label for label in planned["strategies"])
    assert planned["metrics"]["loss"] == pytest.approx(plain["metrics"]["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_budget_that_nothing_fits_is_an_error_before_anything_is_written(tmp_path, train):
    with pytest.raises(NoPlanFitsError):
        train("--budget", "10KiB", "-o", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_saved_plan_is_carried_out_again(tmp_path, train):
    first = train("--epochs", "1", "--use-gradient-checkpointing", "-o", tmp_path / "first")
    again = train("--epochs", "1", "--plan", tmp_path / "first/plan.yaml", "-o", tmp_path / "b")
    assert again["strategies"] == first["strategies"]
    assert again["predicted_peak_bytes"] == first["predicted_peak_bytes"]
    assert again["metrics"] == first["metrics"]


@pytest.mark.slow
def test_the_allocator_cache_is_never_emptied(tmp_path, train, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    train("--epochs", "2", "-o", tmp_path / "run")
    assert not calls
