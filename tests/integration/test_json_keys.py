"""What every command writes with ``--json`` has the same names from version to version."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.snapshots.recorded_programs import steady_training
from tests.workloads.traced import write_run
from tests.zoo.job_files import LINEAR_JOB

from memfit.cli.main import COMMANDS, main

KEYS_FILE = Path(__file__).parent / "json_keys.json"
OPEN = {"by_category", "by_doing", "by_module", "intervals", "facts"}
"""Mappings whose names are data."""
QUICK = {"predict", "verify", "apply", "undo", "config", "replay", "report", "devices"}
"""The others train, or start processes that load torch."""
MIXTURE = (
    *("train", "wpo-sgm", "--data", "8gaussians", "--train_kernel_size", "4", "--niters", "2"),
    *("--train_samples_size", "8", "--validation_samples_size", "4", "--test_samples_size", "4"),
    *("--hiddenunits", "4", "--depth", "1", "--num_generated", "8", "--no-gpu"),
)
CONVE = (
    *("train", "conve", "--dataset", "nations", "--epochs", "1", "--no-gpu"),
    *("--embedding-height", "4", "--embedding-width", "6", "--output-channels", "2"),
)
ENCODER = "{vocabulary: 300, width: 16, layers: 1, heads: 2, hidden: 24, positions: 16}"
NAICS = (
    *("train", "naics", "--stage", "01", "--no-gpu", "--no-baselines"),
    *("--set", "model.base_model_name=random", "--set", f"model.encoder={ENCODER}"),
    *("--set", "model.frozen_layers=0", "--set", "model.moe.hidden_dim=8"),
    *("--set", "data_loader.tokenization.lengths={}", "--set", "data_loader.batch_size=16"),
    *("--set", "data_loader.tokenization.max_length=4", "--set", "training.trainer.max_steps=1"),
)
TRAINS = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    rows = torch.randn(8, 4)
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""

MICRO_BATCHES = """memfit_plan: 1
strategies:
- {name: micro-batching, micro_batch_size: 4}
- {name: fused-attention}
"""

SCRIPT = """
import os
import torch
model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    loss = model(torch.randn(2, 8, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())
    try:
        os.system("true")
    except OSError:
        pass
"""


def keys_of(value: object, place: str = "") -> dict[str, set[str]]:
    """List the names in a JSON value by their place; entries of a list have one place."""
    if isinstance(value, list):
        parts = [keys_of(entry, f"{place}[]") for entry in value]
    elif isinstance(value, dict) and place.rpartition(".")[2] not in OPEN:
        parts = [keys_of(entry, f"{place}.{key}") for key, entry in value.items()]
        parts.append({place: set(value)})
    else:
        return {}
    return {key: set().union(*(part.get(key, ()) for part in parts)) for key in set().union(*parts)}


def words_of(command: str, folder: Path) -> list[str]:
    job = f"{folder / 'job.py'}:job"
    (folder / "job.py").write_text(LINEAR_JOB)
    (folder / "plan.yaml").write_text(
        "memfit_plan: 1\nstrategies:\n- name: optimizer-implementation\n  implementation: fused\n"
    )
    (folder / "snapshot.json").write_text(json.dumps(steady_training(num_steps=1).snapshot()))
    (folder / "train.py").write_text(SCRIPT)
    (folder / "plain.py").write_text(TRAINS)
    (folder / "config.yaml").write_text(
        "data_loader: {batch_size: 8}\ntraining: {trainer: {accumulate_grad_batches: 2}}\n"
    )
    (folder / "micro.yaml").write_text(MICRO_BATCHES)
    (folder / "arguments.yaml").write_text("output_dir: o\nper_device_train_batch_size: 8\n")
    script = [sys.executable, "-c", "print(1)"]
    return {
        "predict": ["predict", job],
        "predict of a script": ["predict", str(folder / "train.py"), "--device", "t4"],
        "compare": ["compare", job, job],
        "predict of cards": ["predict", job, "--device", "t4,l4"],
        "table": ["table", job, "--batch-sizes", "2,4"],
        "plan": ["plan", job],
        "plan over ranks": ["plan", job, "--ranks", "1,2"],
        "apply": ["apply", str(folder / "micro.yaml"), str(folder / "arguments.yaml"), "--yes"],
        "undo": ["undo", str(folder)],
        "config": ["config", "--gpu-memory", "24", "--config-path", str(folder / "config.yaml")],
        "measure": ["measure", job],
        "job": ["job", str(folder / "plain.py"), "--output", str(folder / "job_plain.py")],
        "verify": ["verify", job, "--plan", str(folder / "plan.yaml")],
        "run": ["run", "--folder", str(folder / "run"), "--json", "--", *script],
        "train wpo-sgm": [*MIXTURE, "--save", str(folder / "train")],
        "train naics": [*NAICS, "--output-dir", str(folder / "train")],
        "train conve": [*CONVE, "--output-dir", str(folder / "train")],
        "tracin": ["tracin", "--device", "cpu", "--model-path", str(folder / "traced" / "run")],
        "replay": ["replay", str(folder / "snapshot.json")],
        "replay of a run": ["replay", str(folder / "run")],
        "report": ["report", str(folder / "run"), "--no-page"],
        "devices": ["devices", "t4"],
        "doctor": ["doctor"],
    }[command]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=() if command in QUICK else pytest.mark.slow)
        for command in sorted(json.loads(KEYS_FILE.read_text()))
    ],
)
def test_the_names_in_json_are_those_that_are_listed(command, tmp_path, capfd):
    if command in {"report", "replay of a run"}:
        main(words_of("run", tmp_path))
        capfd.readouterr()
    if command == "train naics":
        pytest.importorskip("lightning")
        pytest.importorskip("peft")
    if command == "tracin":
        write_run(tmp_path / "traced")
    if command == "undo":
        main(words_of("apply", tmp_path))
        capfd.readouterr()
    words = words_of(command, tmp_path)
    main(words if "--json" in words else [*words, "--json"])
    written = capfd.readouterr().out
    found = json.loads(written.splitlines()[-1] if command == "run" else written)
    shown = {place: " ".join(sorted(keys)) for place, keys in keys_of(found).items()}
    assert shown == json.loads(KEYS_FILE.read_text())[command]


def test_every_command_is_listed_but_the_one_that_needs_a_card():
    listed = {words.partition(" ")[0] for words in json.loads(KEYS_FILE.read_text())}
    assert COMMANDS.keys() - {"calibrate"} == listed
