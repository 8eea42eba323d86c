"""Trainings that freeze and unfreeze parts are planned for each of their times, or for the worst."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
import lightning as L
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from tests.zoo.lightning_modules import Classifier, Stream, difference, fitted, samples, trainer
from torch import nn
from torch.utils.data import DataLoader

from memfit.errors import NoPlanFitsError
from memfit.integrations.lightning import MemfitCallback

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class Finetuned(Classifier):
    """A small head on a backbone that is frozen at first and takes most of the memory later."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 16))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.backbone(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        learning = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.SGD(learning, lr=0.1, momentum=0.9)


class InSteps(BaseFinetuning):
    """Let one layer more learn in each epoch, and the head no more in the last one."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[2], optimizer)
        elif epoch == 2:
            self.freeze(pl_module.net)


class Plans(L.Callback):
    """Note the plan of each epoch."""

    def __init__(self, callback: MemfitCallback) -> None:
        self._callback = callback
        self.labels: list[tuple[str, ...]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        plan = self._callback.plan
        self.labels.append(() if plan is None else plan.labels())


def backbone_at_1() -> Any:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0)


def test_each_time_of_a_training_has_its_plan_and_its_measured_peak() -> None:
    plain, _ = fitted(Finetuned, backbone_at_1())
    callback = MemfitCallback(700_000, rehearse=False, forbid=["optimizer-implementation"])
    plans = Plans(callback)
    split, _ = fitted(Finetuned, backbone_at_1(), callback, plans)

    assert plans.labels == [(), ("micro-batching(16)",)]
    assert difference(plain, split) < 1e-12
    assert callback.prediction is not None
    predicted = callback.prediction.peak_allocated_bytes
    assert callback.measured_peak_bytes == pytest.approx(predicted, rel=0.001)


def test_the_worst_time_is_planned_for_from_the_start() -> None:
    plain, _ = fitted(Finetuned, backbone_at_1())
    callback = MemfitCallback(700_000, worst_phase=True, forbid=["optimizer-implementation"])
    plans = Plans(callback)
    split, _ = fitted(Finetuned, backbone_at_1(), callback, plans)

    assert plans.labels == [("micro-batching(16)",)] * 2
    assert difference(plain, split) < 1e-12


def test_a_worst_time_that_does_not_fit_is_an_error_before_the_first_step() -> None:
    steps: list[int] = []

    class Counting(Finetuned):
        def on_train_batch_end(self, *_: Any) -> None:
            steps.append(self.global_step)

    for worst_phase in (True, False):
        steps.clear()
        callback = MemfitCallback(450_000, worst_phase=worst_phase)
        with pytest.raises(NoPlanFitsError):
            fitted(Counting, backbone_at_1(), callback)
        assert len(steps) == (0 if worst_phase else 4)


def test_a_script_whose_later_time_does_not_fit_goes_on_as_it_is() -> None:
    plain, _ = fitted(Finetuned, backbone_at_1())
    told: list[str] = []
    callback = MemfitCallback(450_000, on_refusal=told.append)
    left, _ = fitted(Finetuned, backbone_at_1(), callback)

    assert len(told) == 1
    assert told[0].startswith("from epoch 1 on, when others are trained, there is no plan: No plan")
    assert difference(plain, left) < 1e-12
    assert len(left.losses) == 8


def test_layers_that_learn_one_after_the_other_and_stop_have_the_same_weights() -> None:
    flags = {"max_epochs": 3, "accumulate_grad_batches": 2}
    plain, _ = fitted(Finetuned, InSteps(), **flags)
    callback = MemfitCallback("1GiB", require=["micro-batching"], rehearse=False)
    split, _ = fitted(Finetuned, InSteps(), callback, **flags)

    assert difference(plain, split) < 1e-12
    assert callback.num_plans == 3


def test_data_that_can_be_read_once_and_does_not_fit_is_trained_as_it_is() -> None:
    told: list[str] = []
    made = trainer(MemfitCallback("1KiB", on_refusal=told.append), max_epochs=1)
    module = Classifier()
    made.fit(module, DataLoader(Stream(samples(64)), batch_size=32))

    assert len(told) == 1
    assert "No plan fits" in told[0]
    assert len(module.losses) == 2
