"""Whatever is logged and measured is what the plain training logs, however a plan runs forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
import lightning as L
import torch.nn.functional as F
import torchmetrics
from tests.integrations.lightning.test_guarded_updates import BACKWARD, FORWARD, Shortage
from tests.zoo.lightning_modules import NUM_CLASSES, NUM_FEATURES, difference, fitted
from torch import nn

from memfit.errors import MemfitError
from memfit.integrations.lightning import MemfitCallback
from memfit.strategies import (
    ActivationCheckpointing,
    BatchNormReplay,
    CachedGradients,
    MicroBatching,
)
from memfit.strategies.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
KINDS = torchmetrics.classification


class Stage(nn.Module):
    """A layer that measures its own outputs, and tells whoever owns it to log them."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, 24), nn.ReLU(), norm)
        self.share = torchmetrics.MeanMetric()
        self.told: list[Any] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the features."""
        hidden = self.layers(inputs)
        self.share.update((hidden > 0.1).double().mean(1))
        for tell in self.told:
            tell("largest", hidden.detach().amax(), reduce_fx="max")
        return hidden


class Logging(L.LightningModule):
    """One that logs and measures in all the ways there are, before and behind normalisations."""

    def __init__(self, norm: Any = nn.BatchNorm1d) -> None:
        super().__init__()
        self.stage = Stage(norm(24))
        self.body = nn.Sequential(nn.Linear(24, 24), norm(24), nn.ReLU())
        self.head = nn.Linear(24, NUM_CLASSES)
        self.accuracy = KINDS.MulticlassAccuracy(NUM_CLASSES)
        self.precision_alone = KINDS.MulticlassPrecision(NUM_CLASSES)
        self.f1 = KINDS.MulticlassF1Score(NUM_CLASSES)
        self.both = torchmetrics.MetricCollection(
            {"recall": KINDS.MulticlassRecall(NUM_CLASSES), "top": KINDS.MulticlassAccuracy(4)},
            prefix="c_",
        )
        self.curve = KINDS.MulticlassAUROC(NUM_CLASSES)  # keeps lists, not sums
        self.logged: list[dict[str, float]] = []

    def on_fit_start(self) -> None:
        self.stage.told = [lambda *values, **how: self.log(*values, **how)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean cross entropy."""
        inputs, labels = batch
        early = torch.as_tensor(labels.double().mean())
        self.log("labels", early, on_step=True, on_epoch=True)
        logits = self.head(self.body(self.stage(inputs)))
        loss = F.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.precision_alone.update(logits, labels)
        self.curve.update(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("f1", self.f1(logits, labels), on_step=True, on_epoch=False)
        self.log_dict(self.both(logits, labels), on_step=True, on_epoch=False)
        self.log("rows", float(len(inputs)), reduce_fx="sum", on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.log("norm", norm, on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note(self.trainer.callback_metrics)

    def on_train_epoch_end(self) -> None:
        for name in ("precision_alone", "curve"):
            metric = getattr(self, name)
            self.log(name, metric.compute())
            metric.reset()
        self.log("share", self.stage.share.compute())
        self.stage.share.reset()

    def on_train_end(self) -> None:
        self._note(self.trainer.callback_metrics)

    def _note(self, values: Any) -> None:
        self.logged.append({name: float(value) for name, value in values.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Alone(Logging):
    """Samples that do not meet."""

    def __init__(self) -> None:
        super().__init__(norm=nn.LayerNorm)


WAYS = {
    "as-it-is": (Logging, Plan()),
    "micro-batching": (Alone, Plan(strategies=(MicroBatching(micro_batch_size=12),))),
    "cached-gradients": (Alone, Plan(strategies=(CachedGradients(micro_batch_size=12),))),
    "batchnorm-replay": (Logging, Plan(strategies=(BatchNormReplay(micro_batch_size=12),))),
    "activation-checkpointing": (
        Logging,
        Plan(strategies=(ActivationCheckpointing(blocks=("stage", "body")),)),
    ),
    "both": (
        Alone,
        Plan(
            strategies=(
                ActivationCheckpointing(blocks=("stage", "body")),
                MicroBatching(micro_batch_size=12),
            )
        ),
    ),
}


def compare(kind: Any, plan: Plan, *others: Any, rehearse: bool, **flags: Any) -> MemfitCallback:
    """Train alone and under a plan, and compare all that was logged."""
    plain, _ = fitted(kind, **flags)
    callback = MemfitCallback(plan=plan, rehearse=rehearse)
    planned, _ = fitted(kind, callback, *others, **flags)

    assert difference(plain, planned) < 1e-12
    assert len(planned.logged) == len(plain.logged) > 8
    for number, (one, other) in enumerate(zip(plain.logged, planned.logged, strict=True)):
        assert other == pytest.approx(one, rel=1e-6, abs=1e-9), number
    return callback


@pytest.mark.parametrize("rehearse", [True, False], ids=["rehearsed", "at once"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_logged_and_measured_is_the_same(way: str, rehearse: bool) -> None:
    compare(*WAYS[way], rehearse=rehearse)


@pytest.mark.parametrize("way", WAYS)
def test_a_window_that_is_run_again_logs_each_batch_once(way: str) -> None:
    shortage = Shortage(BACKWARD, batch=5, number=1)
    callback = compare(*WAYS[way], shortage, rehearse=False, accumulate_grad_batches=2)

    assert shortage.has_struck
    assert len(callback.events) == 1


@pytest.mark.parametrize("way", ["micro-batching", "batchnorm-replay"])
def test_a_batch_that_is_run_again_logs_once(way: str) -> None:
    shortage = Shortage(FORWARD, batch=5, number=3)
    callback = compare(*WAYS[way], shortage, rehearse=False)

    assert shortage.has_struck
    assert len(callback.events) == 1


class Asking(Alone):
    """One that asks a metric, in the middle of a step, for what pieces cannot know."""

    asked = "compute"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss."""
        loss = super().training_step(batch, batch_idx)
        getattr(self.precision_alone, self.asked)()
        return loss


class Resetting(Asking):
    """One that resets a metric."""

    asked = "reset"


@pytest.mark.parametrize(
    ("kind", "words"), [(Asking, "for its value so far"), (Resetting, "forget the others")]
)
def test_what_pieces_cannot_tell_of_a_metric_is_refused(kind: Any, words: str) -> None:
    with pytest.raises(MemfitError, match=words):
        fitted(kind, MemfitCallback(plan=WAYS["micro-batching"][1], rehearse=False))
    compare(kind, Plan(), rehearse=False)
