"""Precisions of Lightning under a plan: scaled losses of fp16 on the CPU, and halves throughout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
import lightning as L
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from tests.integrations.lightning.test_guarded_updates import BACKWARD, UPDATE, Shortage
from tests.zoo.lightning_modules import Classifier, difference, fitted, samples, trainer
from torch.utils.data import DataLoader

from memfit.integrations.lightning import MemfitCallback
from memfit.strategies import MicroBatching
from memfit.strategies.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=12),))


class Scaled(Classifier):
    """One that notes the scale after each batch; one batch may have gradients without end."""

    overflows_at = -1

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]).float(), batch[1])
        return loss * math.inf if batch_idx == self.overflows_at else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


class Overflowing(Scaled):
    overflows_at = 1


def scaled(kind: Any, *callbacks: Any, scale: float = 1024.0, **flags: Any) -> Any:
    """Train in fp16 with losses scaled by a real scaler, which Lightning makes for GPUs alone."""
    L.seed_everything(0, verbose=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    module, made = kind(), trainer(*callbacks, plugins=[plugin], **flags)
    made.fit(module, DataLoader(samples(100), batch_size=32, shuffle=True))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}])
@pytest.mark.parametrize("kind", [Scaled, Overflowing])
def test_scaled_losses_skip_the_same_updates(kind: Any, flags: dict[str, Any]) -> None:
    plain = scaled(kind, **flags)
    whole = scaled(kind, MemfitCallback(plan=Plan()), **flags)
    cut = scaled(kind, MemfitCallback(plan=SPLIT, rehearse=False), **flags)

    assert difference(plain, whole) == 0
    assert difference(plain, cut) < 1e-3
    assert plain.scales == whole.scales == cut.scales
    assert len(set(plain.scales)) > 1


def test_a_scale_that_is_too_large_is_found_as_without_a_callback() -> None:
    plain = scaled(Scaled, scale=2.0**20)
    whole = scaled(Scaled, MemfitCallback(plan=Plan()), scale=2.0**20)

    assert plain.scales[0] < 2.0**20
    assert plain.scales == whole.scales
    assert difference(plain, whole) == 0


@pytest.mark.slow
@pytest.mark.parametrize("operator", [BACKWARD, UPDATE])
def test_a_shortage_leaves_the_scale_as_it_was(operator: str) -> None:
    plain = scaled(Overflowing)
    shortage = Shortage(operator, batch=2)
    cut = scaled(Overflowing, MemfitCallback(plan=SPLIT, rehearse=False), shortage)

    assert shortage.has_struck
    assert plain.scales == cut.scales
    assert difference(plain, cut) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_halves_throughout_differ_by_their_rounding(precision: str) -> None:
    plain, _ = fitted(Classifier, precision=precision, max_epochs=1)
    whole, _ = fitted(Classifier, MemfitCallback(plan=Plan()), precision=precision, max_epochs=1)
    callback = MemfitCallback(plan=SPLIT, rehearse=False)
    cut, _ = fitted(Classifier, callback, precision=precision, max_epochs=1)

    assert difference(plain, whole) == 0
    assert 0 < difference(plain, cut) < 0.02
