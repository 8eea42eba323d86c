"""A training that is killed at any moment leaves whole checkpoints, and goes on from the last."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.zoo.processes import TIMEOUT_SECONDS, environment

from memfit_workloads.conve.checkpoints import load_model
from memfit_workloads.epochs import load_checkpoint, newest_checkpoint

pytestmark = pytest.mark.slow

NUM_KILLS = 3


def train(folder: Path, *words: str) -> subprocess.Popen:
    """Start a small training that writes a checkpoint after every epoch."""
    data = ["--dataset", "nations", "--batch-size", "64", "--output-channels", "4", "--no-gpu"]
    outputs = ["--output-dir", str(folder), "--checkpoint-frequency", "1", "--eval-every", "1000"]
    return subprocess.Popen(
        [sys.executable, "-m", "memfit", "train", "conve", *data, *outputs, *words, "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def newest_epoch(folder: Path) -> int:
    """Return the epoch of the newest checkpoint by the names of the files alone."""
    epochs = (path.stem.rpartition("_")[2] for path in folder.glob("checkpoint_epoch_*.pt"))
    return max(map(int, epochs), default=0)


def kill_after(process: subprocess.Popen, folder: Path, epoch: int, pause_seconds: float) -> None:
    """Wait for a checkpoint later than ``epoch``, then a moment more, and kill."""
    deadline_seconds = time.monotonic() + TIMEOUT_SECONDS
    try:
        while newest_epoch(folder) <= epoch:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_seconds, "no checkpoint came"
            time.sleep(0.005)
        time.sleep(pause_seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_training_leaves_whole_checkpoints_and_goes_on_from_the_last(tmp_path):
    moments = random.Random(0)
    folder, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    words: list[str] = []
    for _ in range(NUM_KILLS):
        epoch_before = newest_epoch(checkpoints)
        process = train(folder, "--num-epochs", "5000", *words)
        kill_after(process, checkpoints, epoch_before, moments.uniform(0.0, 0.3))
        for path in checkpoints.glob("checkpoint_*.pt"):
            load_checkpoint(path, "ConvE")
        found = newest_checkpoint(checkpoints, "ConvE")
        assert found.unreadable == []
        assert found.content["epoch"] == newest_epoch(checkpoints) > epoch_before
        load_model(found.path)
        assert not (folder / "final_model.pt").exists()
        words = ["--resume-from-checkpoint", "auto"]
    num_epochs = newest_epoch(checkpoints) + 2
    process = train(folder, "--num-epochs", str(num_epochs), *words)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, err
    assert json.loads(out)["run_folder"] == str(folder)
    assert load_checkpoint(folder / "final_model.pt", "ConvE")["epoch"] == num_epochs
    history = json.loads((folder / "training_history.json").read_text())
    assert [entry["epoch"] for entry in history] == list(range(1, num_epochs + 1))
