"""What the document asks of the NAICS training on the command line: chains, its settings, padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.workloads.test_naics_training import ENCODER, TINY

from memfit.cli.main import main

pytest.importorskip("lightning")
pytest.importorskip("peft")

CHAIN = """\
chain_name: short
stages:
  - name: 01_stage
    max_epochs: 1
    learning_rate: 2e-4
  - name: 05_text
    max_epochs: 1
    learning_rate: 5e-5
"""


def command(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    """Run ``memfit train naics``, which has to succeed, and return what it ends with."""
    given = ["train", "naics", *TINY, *map(str, words), "--no-baselines", "--json"]
    assert main(given) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_chain_file_is_one_run_of_its_stages(tmp_path: Path, capsys) -> None:
    chain, folder = tmp_path / "chain.yaml", tmp_path / "run"
    chain.write_text(CHAIN)
    result = command(capsys, "--chain", chain, "-o", folder)
    assert list(result["stages"]) == ["01_stage", "05_text"]
    assert [each["num_steps"] for each in result["stages"].values()] == [2, 2]
    told = json.loads((folder / "config.json").read_text())
    assert [stage["learning_rate"] for stage in told["stages"]] == [2e-4, 5e-5]
    assert {path.name for path in folder.iterdir()} >= {
        *("final_model.pt", "results.json", "embeddings.npz", "plan.yaml", "05_text"),
    }


def test_a_chain_file_that_is_not_there_or_names_no_stage(tmp_path: Path, capsys) -> None:
    missing, wrong = tmp_path / "missing.yaml", tmp_path / "wrong.yaml"
    wrong.write_text("stages:\n  - name: 09_stage\n")
    cases = ((missing, 1, "there is no such file"), (wrong, 2, "no stage '09_stage'"))
    for path, code, message in cases:
        words = ["train", "naics", *TINY, "--chain", str(path), "-o", str(tmp_path / "run")]
        assert main(words) == code
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_document_s_settings_train_where_its_precision_can_be_had(
    tmp_path: Path, capsys
) -> None:
    words = ("--preset", "document", "--stage", "01", "--set", "data_loader.num_workers=0")
    folder = tmp_path / "run"
    assert main(["train", "naics", *TINY, *words, "-o", str(folder)]) == 2
    assert "fp16 has no kernels for training on the CPU" in " ".join(
        capsys.readouterr().err.split()
    )
    assert not folder.exists()
    precision = ("--set", "training.trainer.precision=32-true")
    result = command(
        capsys, *words, *precision, "--set", "training.trainer.max_steps=1", "-o", folder
    )
    settings = json.loads((folder / "config.json").read_text())["settings"]
    assert settings["loss"]["temperature"] == 0.07
    assert settings["loss"]["rank_weight"] == 0.275
    assert settings["data_loader"]["negatives"] == "own"
    assert settings["training"]["trainer"]["accumulate_grad_batches"] == 5
    assert result["stages"]["01_stage"]["num_steps"] == 1
    assert result["stages"]["01_stage"]["train_rank"] > 0
    assert result["metrics"]["lorentz_violation"] <= 1e-5


@pytest.mark.slow
def test_padding_to_the_longest_trains_the_same_weights(tmp_path: Path, capsys) -> None:
    exact = (
        *("--stage", "05", "--set", "training.trainer.precision=64-true"),
        *("--set", "model.lora.dropout=0.0", "--set", "model.moe.dropout=0.0"),
        *("--set", f"model.encoder={ENCODER[:-1]}, dropout: 0.0}}"),
        # Long enough that padding differs from step to step.
        *("--set", "data_loader.tokenization.lengths={title: 12, description: 16}"),
    )
    found = {}
    for padding in ("max_length", "longest"):
        folder = tmp_path / padding
        given = ("--set", f"data_loader.tokenization.padding={padding}", "-o", folder)
        result = command(capsys, *exact, *given)
        learned = torch.load(folder / "final_model.pt")["learned"]
        found[padding] = result["stages"]["05_stage"], learned
    (losses, weights), (other_losses, others) = found.values()
    for name, value in losses.items():
        assert other_losses[name] == pytest.approx(value, rel=1e-10)
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, rtol=1e-10, atol=1e-10)
