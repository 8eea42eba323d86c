"""A checkpoint goes on as Lightning has it, with the callback before, behind, both or neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.zoo.lightning_modules import Measured, difference, samples, trainer
from torch.utils.data import DataLoader

from memfit.integrations.lightning import MemfitCallback
from memfit.strategies import MicroBatching
from memfit.strategies.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=12),))


def trained(folder: Any, *, is_planned: bool, resumed: Any = None, **flags: Any) -> Any:
    """Train over batches of 32, 32, 32 and 4 samples, with a checkpoint of each update."""
    L.seed_everything(0, verbose=False)
    writer = ModelCheckpoint(
        dirpath=folder, save_top_k=-1, every_n_train_steps=1, filename="{step}"
    )
    callbacks = [MemfitCallback(plan=SPLIT, rehearse=False)] if is_planned else []
    made = trainer(*callbacks, writer, precision="64-true", enable_checkpointing=True, **flags)
    module = Measured()
    data = DataLoader(samples(100, torch.float64), batch_size=32)
    made.fit(module, data, ckpt_path=resumed)
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    return module, made.global_step, metrics


@pytest.mark.parametrize("accumulated", [1, 2, 3])
@pytest.mark.parametrize("place", ["in an epoch", "at its end"])
def test_checkpoints_go_on_in_all_combinations(tmp_path: Any, place: str, accumulated: int) -> None:
    flags = {"accumulate_grad_batches": accumulated}
    updates = -(-4 // accumulated)
    step = updates if place == "at its end" else updates - 1
    goals = []
    for before in (False, True):
        folder = tmp_path / f"{before}"
        trained(folder, is_planned=before, max_epochs=1, **flags)
        checkpoint = folder / f"step={step}.ckpt"
        for behind in (False, True):
            again = folder / f"{behind}"
            goals.append(trained(again, is_planned=behind, resumed=checkpoint, **flags))

    (plain, steps, metrics), *others = goals
    for module, num_steps, logged in others:
        assert difference(plain, module) < 1e-12
        assert num_steps == steps == 2 * updates
        assert logged == pytest.approx(metrics, rel=1e-6)
        assert module.losses == pytest.approx(plain.losses, abs=1e-12)
