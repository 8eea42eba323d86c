"""Weights that a script loads from a folder lie where they lie in the real run, and for as long."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from tests.script.running import measured, predicted, recorded

from memfit.errors import RecordingError
from memfit.trace.events import Category

pytestmark = pytest.mark.slow

FINE_TUNE = """
    import sys
    import torch
    from transformers import AutoModelForSequenceClassification
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name, dtype = sys.argv[1:]
    model = AutoModelForSequenceClassification.from_pretrained(name, dtype=getattr(torch, dtype))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    model.train()
    for step in range(4):
        tokens = torch.randint(0, 3000, (2, 16), device=device)
        labels = torch.randint(0, 2, (2,), device=device)
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SAVE = """
    import torch
    from safetensors.torch import load_file, save_file
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    save_file(model.state_dict(), "best.safetensors")
    for step in range(4):
        found = load_file("best.safetensors")
        assert found["weight"].shape == (300, 300) and found["weight"].dtype == torch.float32
        model.load_state_dict(found)
        del found
        model(torch.randn(2, 300)).sum().backward()
        optimizer.step()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script into an empty folder, which is the working one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # Torch's profiler, which measures, does not see what other threads allocate.
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")

    def write(source: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(source))
        return path

    return write


@pytest.fixture
def bert(tmp_path):
    """Save a small BERT in one of the ways in which weights are saved; return its bytes."""
    transformers = pytest.importorskip("transformers")
    import torch

    def save(kind: str) -> int:
        config = transformers.BertConfig(
            vocab_size=3000,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=32,
        )
        model = transformers.BertForSequenceClassification(config)
        folder = tmp_path / "bert"
        model.save_pretrained(folder, max_shard_size="300KB" if kind == "shards" else "1GB")
        if kind == "bin":
            (folder / "model.safetensors").unlink()
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
        return sum(each.nbytes for each in model.parameters())

    return save


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("whole", "float32"), ("shards", "float32"), ("bin", "float32"), ("whole", "bfloat16")],
)
def test_a_loaded_model_takes_the_bytes_that_the_allocator_reports(script, bert, kind, dtype):
    bert(kind)
    path = script(FINE_TUNE)
    found, real = predicted(recorded(path, "bert", dtype)), measured(path, "bert", dtype)
    assert found[0][1] == pytest.approx(real[0][1], rel=0.03)
    assert [phase for phase, _ in found[:3]] == ["load", "first step", "steady step"]
    for prediction, reading in zip(found[1:3], real[1:3], strict=True):
        assert prediction[1] == pytest.approx(reading[1], rel=0.001), prediction[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["whole", "bin"])
def test_on_a_card_loaded_weights_and_their_states_are_counted_as_such(script, bert, kind):
    num_bytes = bert(kind)
    found = recorded(script(FINE_TUNE), "bert", "float32", device="t4")
    sizes = dict.fromkeys(Category, 0)
    steady = found.recording.steady
    for each in steady.allocations:
        sizes[each.category] += each.num_bytes
    assert sizes[Category.PARAMETERS] == num_bytes
    assert sizes[Category.OPTIMIZER_STATE] == pytest.approx(2 * num_bytes, rel=0.001)
    load, first = found.spans[:2]
    # The file is mapped while its weights go to the card, and no longer.
    assert num_bytes < load.host_peak_bytes < 1.1 * num_bytes
    assert first.host_peak_bytes < 0.1 * num_bytes


def test_weights_that_the_script_itself_saved_are_loaded_again(script):
    assert len(recorded(script(SAVE)).recording.marks) == 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["/nowhere/bert", "./bert", "bert", "someone/bert"])
def test_a_folder_that_is_not_there_is_named_and_no_weights_are_needed(script, name):
    pytest.importorskip("transformers")
    with pytest.raises(RecordingError, match=f"'{name}' is no folder") as caught:
        recorded(script(FINE_TUNE), name, "float32")
    assert "No weights are needed" in str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_a_file_of_weights_that_is_not_there_is_named(script, bert, tmp_path, kind):
    bert(kind)
    lost = sorted((tmp_path / "bert").glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(RecordingError, match=lost.name) as caught:
        recorded(script(FINE_TUNE), "bert", "float32")
    assert "No weights are needed" in str(caught.value)
