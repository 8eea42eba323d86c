"""What pieces of a batch log makes up the value of the batch, or is named where it cannot."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.loggers import TensorBoardLogger
from tests.zoo.lightning_modules import (
    Classifier,
    Tagger,
    difference,
    fitted,
    samples,
    tagged,
    trainer,
)
from torch.utils.data import DataLoader

from memfit.errors import MemfitWarning
from memfit.integrations.lightning import MemfitCallback, plan
from memfit.integrations.lightning.joins import Found, Join, Pieces
from memfit.strategies import BatchNormReplay, MicroBatching
from memfit.strategies.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=12),))
REPLAY = Plan(strategies=(BatchNormReplay(micro_batch_size=12),))


class Noting(Classifier):
    """One that notes what each batch has logged."""

    def __init__(self, **kinds: Any) -> None:
        super().__init__(**kinds)
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        values = self.trainer.callback_metrics
        self.logged.append({name: float(value) for name, value in values.items()})

    def on_train_end(self) -> None:
        self.on_train_batch_end(None, None, 0)


class ManyKinds(Noting):
    """Values that are no means over samples, as public repositories log them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        logits = self.net(inputs)
        loss = F.cross_entropy(logits, labels)
        log = functools.partial(self.log, on_step=True, on_epoch=True)
        log("loss", loss)
        log("perplexity", loss.exp())
        log("rmse", loss.sqrt())
        log("log", loss.log())
        log("largest", logits.max())
        log("hits", (logits.argmax(-1) == labels).sum().to(loss.dtype))
        log("mean of a sum", loss, reduce_fx="sum")
        log("mean of a maximum", loss, reduce_fx="max")
        log("constant size", loss, batch_size=32)
        log("own size", loss, batch_size=len(inputs))
        if self.global_step % 3 == 1:
            log("sometimes", loss.exp())
        return loss


def spoken(call: Any) -> tuple[Any, list[str]]:
    """Return what a call gives, and what memfit warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [str(each.message) for each in caught if issubclass(each.category, MemfitWarning)]


@pytest.mark.slow
def test_what_is_no_mean_over_samples_is_that_of_the_batch() -> None:
    plain, _ = fitted(ManyKinds)
    (split, _), words = spoken(lambda: fitted(ManyKinds, MemfitCallback(plan=SPLIT)))

    assert len(split.logged) == len(plain.logged) == 9
    for one, other in zip(plain.logged, split.logged, strict=True):
        assert other == pytest.approx(one, rel=1e-6)
    assert not words
    assert 0 < difference(plain, split) < 1e-12


@pytest.mark.slow
def test_a_trial_under_statistics_of_the_batch_leaves_them_alone() -> None:
    normed = functools.partial(ManyKinds, has_norm=True)
    plain, _ = fitted(normed, max_epochs=1)
    split, _ = fitted(normed, MemfitCallback(plan=REPLAY, rehearse=False), max_epochs=1)

    for one, other in zip(plain.logged, split.logged, strict=True):
        assert other == pytest.approx(one, rel=1e-6)
    assert difference(plain, split) < 1e-12


@pytest.mark.slow
def test_what_no_way_gives_is_named_once() -> None:
    class Spread(ManyKinds):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("spread", batch[0].std())
            return super().training_step(batch, batch_idx)

    callback = MemfitCallback(plan=SPLIT, rehearse=False)
    _, words = spoken(lambda: fitted(Spread, callback, max_epochs=1))

    assert len(words) == 1
    assert "logs 'spread', which for a batch is neither a mean" in words[0]


@pytest.mark.slow
def test_values_of_half_precision_are_tried_in_full() -> None:
    flags = {"precision": "bf16-mixed", "max_epochs": 1}
    plain, _ = fitted(ManyKinds, **flags)
    callback = MemfitCallback(plan=SPLIT, rehearse=False)
    (split, _), words = spoken(lambda: fitted(ManyKinds, callback, **flags))

    assert not words
    for one, other in zip(plain.logged, split.logged, strict=True):
        assert other == pytest.approx(one, rel=0.02)


@pytest.mark.slow
def test_a_mean_over_samples_beside_a_loss_over_labels_counts_by_samples() -> None:
    class Both(Tagger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            length = (batch[1] != -100).double().sum(1).mean()
            self.log("length", length, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    _, plain = fitted(Both, data=tagged, max_epochs=1)
    callback = MemfitCallback(plan=SPLIT, rehearse=False)
    _, split = fitted(Both, callback, data=tagged, max_epochs=1)

    numbers = {name: value.item() for name, value in plain.callback_metrics.items()}
    found = {name: value.item() for name, value in split.callback_metrics.items()}
    assert found == pytest.approx(numbers, rel=1e-6)


class Captured(Noting):
    """One that has taken its ``log`` along before training, as helpers do."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4)
        self.kept = self.log
        self.partly = functools.partial(self.log, on_step=True, on_epoch=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.kept("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.kept("rows", float(len(logits)), reduce_fx="sum")
        self.partly("perplexity", loss.exp())
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("rehearse", [True, False], ids=["rehearsed", "at once"])
def test_a_log_that_was_kept_before_training_logs_batches(rehearse: bool) -> None:
    plain, _ = fitted(Captured)
    split, _ = fitted(Captured, MemfitCallback(plan=SPLIT, rehearse=rehearse))

    assert len(split.logged) == len(plain.logged) == 9
    for one, other in zip(plain.logged, split.logged, strict=True):
        assert other == pytest.approx(one, rel=1e-6)


class Direct(Classifier):
    """One that writes to the logger itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if isinstance(self.logger, TensorBoardLogger):
            self.logger.experiment.add_scalar("direct", loss, self.global_step)
        return loss


def written(folder: Any) -> list[int]:
    """Return the steps at which something was written."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(folder)
    accumulator.Reload()
    return [each.step for each in accumulator.Scalars("direct")]


@pytest.mark.slow
@pytest.mark.parametrize("plan_of", [Plan(), SPLIT], ids=["whole", "cut"])
def test_what_a_step_writes_itself_is_one_line_for_each_batch(tmp_path: Any, plan_of: Any) -> None:
    logger = TensorBoardLogger(str(tmp_path))
    callback = MemfitCallback(plan=plan_of)
    _, words = spoken(lambda: fitted(Direct, callback, logger=logger, max_epochs=1))
    logger.experiment.flush()

    assert written(logger.log_dir) == [0, 1, 2, 3]
    is_told = any("writes to its logger itself" in each for each in words)
    assert is_told is (plan_of is SPLIT)


@pytest.mark.slow
def test_planning_writes_nothing_to_a_logger(tmp_path: Any) -> None:
    logger = TensorBoardLogger(str(tmp_path))
    made = trainer(logger=logger)
    found = plan(made, Direct(), DataLoader(samples(64), batch_size=32), budget="1GiB")

    assert found.prediction is not None
    assert made.loggers == [logger]
    assert not [*tmp_path.rglob("events*")]


def pieces(*values: float, samples: tuple[int, ...] = (4, 4, 2)) -> Pieces:
    return Pieces(values, {"samples": samples})


def test_ways_are_given_up_until_one_is_left() -> None:
    found = Found()
    found.take(float("nan"), pieces(1.0, 2.0, 0.0), 1e-6)
    found.take(0.0, pieces(0.0, 0.0, 0.0), 1e-6)  # nothing was hit, which says nothing
    assert not found.is_settled
    found.take(3.0, pieces(1.0, 2.0, 0.0), 1e-6)

    assert found.joins == [Join("sum")]
    assert found.best(Join("mean", "samples")) == Join("sum")


def test_what_every_way_gives_stays_a_mean_and_is_not_tried_for_ever() -> None:
    found = Found()
    for _ in range(8):
        assert not found.is_settled
        found.take(0.1, pieces(0.1, 0.1, 0.1), 1e-6)

    assert found.is_settled
    assert found.best(Join("mean", "samples")) == Join("mean", "samples")


def test_pieces_that_count_nothing_are_left_out() -> None:
    without_labels = pieces(1.0, float("nan"), 4.0, samples=(2, 0, 1))

    assert Join("mean", "samples")(without_labels) == 2.0
    assert torch.isclose(Join("root", "samples")(without_labels), torch.tensor(6.0).sqrt())
