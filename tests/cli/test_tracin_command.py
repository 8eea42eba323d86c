"""``memfit tracin`` on the command line: its flags, its JSON, and what it leaves unloaded."""

import json
import re

import pytest
from tests.workloads.traced import write_run
from tests.zoo.processes import imports_after

from memfit.cli.main import main

FLAGS = (
    *("--model-path", "--train", "--test", "--entity-to-id", "--relation-to-id", "--edge-map"),
    *("--node-name-dict", "--output", "--csv-output", "--mode", "--test-indices"),
    *("--max-test-triples", "--top-k", "--learning-rate", "--embedding-dim", "--output-channels"),
    *("--device", "--output-per-triple", "--batch-size", "--use-last-layers-only"),
    *("--num-last-layers", "--last-layer-names", "--use-mixed-precision"),
    *("--use-gradient-checkpointing", "--disable-memory-cleanup"),
    *("--disable-vectorized-gradients", "--disable-test-gradient-caching", "--use-torch-compile"),
    *("--enable-multi-gpu", "--use-optimized-tracin", "--loss", "--triple-loss", "--checkpoints"),
    *("--budget", "--dataset", "--dry-run", "--json"),
)


def test_every_flag_is_in_the_help(capsys) -> None:
    assert main(["tracin", "--help"]) == 0
    text = capsys.readouterr().out

    assert [flag for flag in FLAGS if not re.search(rf"{flag}\b", text)] == []


def test_help_leaves_torch_alone() -> None:
    code = "from memfit.cli.main import main; main(['tracin', '--help'])"

    assert not imports_after(code, "torch", "rich")


def test_a_model_has_to_be_named(capsys) -> None:
    assert main(["tracin"]) == 2
    assert "--model-path" in capsys.readouterr().err


@pytest.mark.slow
def test_json_alone_goes_to_standard_output(tmp_path, capsys) -> None:
    run = write_run(tmp_path)
    words = ["--model-path", str(run), "--mode", "self", "--device", "cpu", "--top-k", "2"]
    assert main(["tracin", *words, "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)

    assert "Predicted on cpu" in captured.err
    assert len(found["self_influence"]) == 2
    assert found["predicted_peak_bytes"] > 0
    assert found["files"] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["test", "self"])
def test_the_terminal_shows_triples_by_name(mode, tmp_path, capsys) -> None:
    run = write_run(tmp_path)
    assert main(["tracin", "--model-path", str(run), "--mode", mode, "--device", "cpu"]) == 0
    text = capsys.readouterr().out

    assert re.search(r"[+-]\d\.\d{3}e[+-]\d\d  e\d+ \| r\d \| e\d+", text)
