"""A NAICS run that is interrupted and gone on with is the run that was never interrupted."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest
import torch
from tests.workloads.test_naics_training import run

from memfit.errors import DataError, UsageError

pytest.importorskip("lightning")
pytest.importorskip("peft")

from memfit_workloads.naics.checkpoints import LAST, StageCheckpoints

pytestmark = pytest.mark.slow

TWO_STAGES = (
    *("--stage", "01", "--stage", "01", "--no-baselines"),
    *("--set", "data_loader.batch_size=130", "--set", "training.trainer.max_steps=-1"),
    *("--set", "training.trainer.max_epochs=2"),
)


def press_ctrl_c_after_update(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    """Have the process receive SIGINT when an update of this run has ended; None for never."""
    ended = StageCheckpoints.on_train_batch_end
    numbers = itertools.count(1)

    def interrupted(self: StageCheckpoints, *given: object) -> None:
        if next(numbers) == number:
            signal.raise_signal(signal.SIGINT)
        ended(self, *given)

    monkeypatch.setattr(StageCheckpoints, "on_train_batch_end", interrupted)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "final_model.pt")["learned"]
    return found


def test_a_run_interrupted_anywhere_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    straight = run(*TWO_STAGES, "-o", whole)
    per_stage = straight["stages"]["01_stage"]["num_steps"]
    assert per_stage >= 4  # two epochs of at least two steps
    # Inside an epoch, at its end, inside the next, at the end of the stage, inside the second.
    for count in (1, per_stage // 2 - 1, 1, per_stage // 2 - 1, 2):
        with monkeypatch.context() as patched:
            press_ctrl_c_after_update(patched, count)
            with pytest.raises(KeyboardInterrupt):
                run(*TWO_STAGES, "-o", parts, *(["--resume"] if parts.exists() else []))
        assert not (parts / "final_model.pt").exists()
    resumed = run(*TWO_STAGES, "-o", parts, "--resume")

    assert list(resumed["stages"]) == list(straight["stages"]) == ["01_stage", "01_stage_2"]
    for name in straight["stages"]:
        assert resumed["stages"][name]["num_steps"] == per_stage
    assert resumed["metrics"] == straight["metrics"]
    one, other = weights(whole), weights(parts)
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=0)


def test_a_part_of_what_was_learned_is_kept_and_other_runs_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--stage", "01", "--no-baselines", "--set", "training.trainer.max_steps=1")
    with pytest.raises(UsageError, match="holds no checkpoint to continue from"):
        run(*words, "-o", folder, "--resume")
    assert not folder.exists()
    run(*words, "-o", folder)
    learned = torch.load(folder / "checkpoints" / LAST)["state_dict"]
    for name, value in weights(folder).items():
        if "lora_B" in name:  # they begin with 0, and conf/cpu.yaml keeps half of the way
            torch.testing.assert_close(value, learned[name] / 2)
    with pytest.raises(UsageError, match=r"loss.temperature 0.5 there, 0.4 here"):
        run(*words, "--set", "loss.temperature=0.4", "-o", folder, "--resume")
    checkpoint = folder / "checkpoints" / LAST
    checkpoint.write_bytes(checkpoint.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        run(*words, "-o", folder, "--resume")
