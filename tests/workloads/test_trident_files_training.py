"""Steps on clips from files: the batches are those of clips in memory, ahead, and continued."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.workloads.test_trident_training import PLAN
from tests.workloads.training import train_workload
from torch import Tensor, nn

from memfit.errors import DataError, UsageError
from memfit_workloads.checkpoint_files import refuse_other_run
from memfit_workloads.trident import WORKLOAD, recorded
from memfit_workloads.trident.train import TridentTraining

GENERATED = (
    *("--synthetic", "--num-clips", "10", "--num-valid-clips", "4", "--num-test-clips", "4"),
    *("--num-frames", "8", "--height", "16", "--width", "16"),
)
Batches = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[str, ...]:
    """Write clips as video without loss, and return the flags that train on them."""
    pytest.importorskip("av")
    folder = tmp_path_factory.mktemp("clips") / "made"
    made = (*GENERATED, "--data-seed", "1")
    words = (*made, "--write-clips", folder, "--clip-format", "mkv")
    return tuple(train_workload("trident", words)["command"].split()[3:])


def training(*words: object) -> TridentTraining:
    """Make a training ready for its first step, beside a run that computes nothing."""
    parser = argparse.ArgumentParser()
    WORKLOAD.add_arguments(parser)
    told = (*words, "--batch-size", 4, "--data-seed", 1)
    args = parser.parse_args([str(word) for word in told])
    system = TridentTraining(WORKLOAD.settings_from(args, ""), Console(quiet=True))
    model = nn.Linear(1, 1)
    optimizer = SimpleNamespace(param_groups=[{}])
    system.run = SimpleNamespace(model=model, optimizer=optimizer)  # type: ignore[assignment]
    system.begin()
    return system


def steps(system: TridentTraining, number: int) -> Batches:
    """Take so many steps, over the end of epochs."""
    batches = []
    for _ in range(number):
        batches.append(system.next_batch())
        system.step_done(1.0, 0.0)
        if system.state.steps_done == len(system._batches):
            system._batches, system.state.steps_done = (), 0
            system.state.epoch += 1
    return batches


def assert_same(ours: Batches, theirs: Batches) -> None:
    """Hold batches to be equal, part by part."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_video_that_is_read_ahead_gives_the_batches_of_clips_in_memory(written):
    in_memory = steps(training(*GENERATED), 5)
    assert not torch.equal(in_memory[0]["rgb"], in_memory[2]["rgb"])
    assert_same(steps(training(*written, "--num-workers", 2), 5), in_memory)
    assert_same(steps(training(*written), 5), in_memory)


@pytest.mark.slow
def test_within_an_epoch_a_continuation_reads_what_the_run_would_have_read(written):
    whole = steps(training(*written), 5)
    first, second = (training(*written, "--num-workers", 2) for _ in range(2))
    steps(first, 4)  # the fifth is the second of its epoch, and is being read
    second._order.set_state(first._order_state)
    second.state.epoch, second.state.steps_done = first.state.epoch, first.state.steps_done
    assert_same(steps(second, 1), whole[4:])


@pytest.mark.slow
def test_a_run_is_not_continued_on_other_records(written):
    manifest = Path(written[1])
    lines = manifest.read_text().splitlines()
    told = json.loads(lines[3])
    told["object"]["conf"] = 0.5
    other = manifest.with_name("other.jsonl")
    other.write_text("\n".join([*lines[:3], json.dumps(told), *lines[4:]]))
    same = manifest.with_name("same.jsonl")
    same.write_text("\n\n".join(lines) + "\n")

    there = training(*written).data_config()
    here = {path: training(written[0], path, *written[2:]).data_config() for path in (other, same)}
    assert here[same] == there
    with pytest.raises(UsageError, match=r"clips records \w+ there, records \w+ here"):
        refuse_other_run(Path("a.pt"), there, here[other], flag="--resume-from-checkpoint")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_clip_that_is_damaged_later_stops_training_and_names_its_record(
    written, monkeypatch, num_workers
):
    read = recorded.open_frames

    def broken(path: Path, num_channels: int) -> Any:
        if path.name == "train_00005_ir.mkv":
            raise DataError(str(path), "frame 3 is damaged")
        return read(path, num_channels)

    system = training(*written, "--num-workers", num_workers)
    monkeypatch.setattr(recorded, "open_frames", broken)
    match = r"train\.jsonl, line 6: video\.ir_path: .*train_00005_ir\.mkv: frame 3 is damaged"
    with pytest.raises(DataError, match=match):
        steps(system, 3)


def test_a_bad_manifest_is_an_error_before_anything_is_written(tmp_path):
    path = tmp_path / "clips.jsonl"
    path.write_text('{"video": {"path": "gone.npy"}}\n')
    with pytest.raises(DataError, match="line 1"):
        train_workload("trident", ("--jsonl", path, "-o", tmp_path / "run"), Console(quiet=True))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_on_video_keeps_its_predicted_peak_and_shows_its_calibration(tmp_path, written):
    plan, folder = tmp_path / "plan.yaml", tmp_path / "run"
    plan.write_text(PLAN)
    flags = ("--no-gpu", "--epochs", "2", "--num-workers", "2", "--plan", plan, "-o", folder)
    result = train_workload("trident", (*written, *flags))
    assert result["measured_peak_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=1e-3)
    assert (folder / "calibration.png").read_bytes()[:4] == b"\x89PNG"
    assert 'alt="calibration' in (folder / "report.html").read_text()
