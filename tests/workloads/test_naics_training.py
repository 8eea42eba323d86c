"""NAICS as a whole: runs, files, peaks, plans, refusals."""

import json

import numpy as np
import pytest
import torch
from tests.workloads.training import train_workload

from memfit.errors import MissingExtraError, UsageError

pytest.importorskip("lightning")
pytest.importorskip("peft")

from memfit_workloads.naics import train
from memfit_workloads.naics.inputs import read_inputs
from memfit_workloads.naics.settings import CACHED, settings_of

ENCODER = "{vocabulary: 300, width: 16, layers: 1, heads: 2, hidden: 24, positions: 16}"
TINY = (
    *("--set", "model.base_model_name=random", "--set", f"model.encoder={ENCODER}", "--no-gpu"),
    *("--set", "model.frozen_layers=0", "--set", "model.moe.hidden_dim=8"),
    *("--set", "data_loader.tokenization.lengths={title: 6, description: 8}"),
    *("--set", "data_loader.tokenization.max_length=4", "--set", "data_loader.batch_size=16"),
    *("--set", "training.trainer.max_steps=2"),
)


def run(*words: object) -> dict:
    return train_workload("naics", (*TINY, *words))


@pytest.mark.slow
def test_two_stages_in_one_run_inside_a_budget(tmp_path):
    folder = tmp_path / "run"
    result = run("--stage", "01", "--stage", "05", "--budget-fraction", "0.6", "-o", folder)

    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert any(CACHED in label for label in result["strategies"])
    assert result["predicted_peak_bytes"] <= result["budget_bytes"] < result["plain_peak_bytes"]
    assert result["measured_peak_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.05)
    assert list(result["stages"]) == ["01_stage", "05_stage"]
    assert result["metrics"]["lorentz_violation"] <= 1e-5
    assert not result["metrics"]["is_collapsed"]
    assert {"character TF-IDF, titles", "TF-IDF, all texts", "this model before training"} < set(
        result["baselines"]
    )
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "plan.yaml", "final_model.pt", "results.json", "embeddings.npz"}
    saved = np.load(folder / "embeddings.npz")
    assert saved["points"].shape == (2125, 17)
    learned = torch.load(folder / "final_model.pt", weights_only=True)["learned"]
    assert any("lora" in name for name in learned)
    assert not any("word_embeddings" in name for name in learned)
    with pytest.raises(UsageError, match="already holds a run"):
        run("--stage", "01", "-o", folder)


def settings(*words: object):
    import argparse

    from memfit_workloads.naics.settings import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_of(parser.parse_args([str(word) for word in words]), "memfit train naics")


def test_a_budget_asks_for_cached_gradients():
    with_budget = settings("--stage", "01", "--budget", "1GiB").memory_settings
    assert with_budget.require == (CACHED,)
    assert settings("--stage", "01").memory_settings.require == ()
    free = settings("--stage", "01", "--budget", "1GiB", "--any-strategy").memory_settings
    assert free.require == ()
    demo = settings("--demo").memory_settings
    assert demo.budget_fraction == pytest.approx(0.5)


@pytest.mark.slow
def test_held_out_codes_are_in_no_step():
    inputs = read_inputs(settings("--stage", "05", *TINY))
    parts = [set(inputs.train), set(inputs.validation), set(inputs.test)]
    assert sum(map(len, parts)) == len(inputs.tree) == len(set.union(*parts))
    subsectors = [{inputs.tree.codes[row][:3] for row in part} for part in parts[1:]]
    assert not subsectors[0] & subsectors[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Say what to train"),
        (("--stage", "09"), "There is no stage '09'"),
        (("--stage", "01", "--set", "loss.curvature=0"), "loss.curvature is 0; needed is a number"),
        (
            ("--stage", "01", "--set", "loss.kind=mse"),
            "loss.kind is mse; needed is dcl or info_nce",
        ),
        (("--stage", "01", "--set", "data_loader.tokenization.padding=none"), "padding is none"),
        (("--stage", "01", "--set", "model.moe.top_k=9"), "needed is at most 4 experts"),
    ],
)
def test_settings_that_nothing_can_be_made_of(words, message):
    with pytest.raises(UsageError, match=message):
        settings(*words)


@pytest.mark.slow
def test_the_document_s_precision_needs_a_gpu(tmp_path):
    with pytest.raises(UsageError, match="precision=32-true"):
        run("--stage", "01", "--preset", "document", "-o", tmp_path / "run")


@pytest.mark.slow
def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="naics"):
        run("--stage", "01", "-o", tmp_path / "run")
