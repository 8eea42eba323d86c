"""A run of DreaMS that is gone on with is the run that was never interrupted."""

from pathlib import Path

import pytest
import torch
from tests.workloads.test_dreams_training import few, run

from memfit.errors import UsageError

pytest.importorskip("lightning")
__all__ = ["few"]


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["pretrain", "finetune"])
def test_a_resumed_run_has_the_weights_of_one_that_was_not_interrupted(
    regime: str, tmp_path: Path, few: Path
) -> None:
    shared = ("--dataset_pth", few, "--batch_size", 4, "--dropout", 0)
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    straight = run(regime, *shared, "--max_epochs", 3, "-o", whole)
    run(regime, *shared, "--max_epochs", 2, "-o", parts)
    checkpoint = parts / "checkpoints" / "last.ckpt"
    resumed = run(
        regime, *shared, "--max_epochs", 3, "-o", parts, "--resume_from_checkpoint", checkpoint
    )

    assert resumed["num_steps"] == straight["num_steps"] == 6
    assert resumed["metrics"] == pytest.approx(straight["metrics"])
    one, other = (torch.load(each / "final_model.pt") for each in (whole, parts))
    for part in ("backbone", "head"):
        for name, value in one[part].items():
            torch.testing.assert_close(value, other[part][name], rtol=0, atol=0)


def test_several_devices_are_refused_before_anything_is_written(tmp_path: Path, few: Path) -> None:
    words = ("--dataset_pth", few, "--folds", 2, "--train_objective", "has_N")

    with pytest.raises(UsageError, match="--num_devices 2 cannot be had"):
        run("finetune", *words, "--num_devices", 2, "-o", tmp_path / "run")
    assert not (tmp_path / "run").exists()
