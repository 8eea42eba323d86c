"""A training under a plan has the weights, the logged values and the hooks of the plain one."""

from __future__ import annotations

import csv
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
from lightning.pytorch.loggers import CSVLogger
from tests.zoo.lightning_modules import (
    Classifier,
    Measured,
    Stream,
    Tagger,
    difference,
    fitted,
    samples,
    tagged,
)
from torch.utils.data import DataLoader

from memfit.integrations.lightning import MemfitCallback
from memfit.strategies import BatchNormReplay, MicroBatching
from memfit.strategies.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=12),))
WAYS: list[dict[str, Any]] = [
    {},
    {"gradient_clip_val": 0.1},
    {"accumulate_grad_batches": 3},
    {"precision": "bf16-mixed"},
    {"precision": "16-mixed"},
]


@pytest.mark.parametrize("flags", WAYS, ids=str)
def test_without_strategies_all_bits_are_the_same(flags: dict[str, Any]) -> None:
    plain, _ = fitted(Classifier, **flags)
    guarded, trainer = fitted(Classifier, MemfitCallback(plan=Plan()), **flags)

    assert difference(plain, guarded) == 0
    assert plain.losses == guarded.losses
    assert plain.hooks == guarded.hooks
    assert trainer.global_step == (4 if "accumulate_grad_batches" in flags else 8)


@pytest.mark.parametrize("flags", WAYS[:3], ids=str)
def test_pieces_of_uneven_batches_add_up(flags: dict[str, Any]) -> None:
    plain, _ = fitted(Classifier, **flags)
    split, _ = fitted(Classifier, MemfitCallback(plan=SPLIT), **flags)

    assert 0 < difference(plain, split) < 1e-12
    assert split.losses == pytest.approx(plain.losses, abs=1e-12)
    assert split.hooks == plain.hooks


def test_single_precision_differs_by_rounding() -> None:
    plain, _ = fitted(Classifier, precision="32-true")
    split, _ = fitted(Classifier, MemfitCallback(plan=SPLIT), precision="32-true")

    assert difference(plain, split) < 1e-6


def test_batch_normalisation_keeps_its_statistics() -> None:
    normed = partial(Classifier, has_norm=True)
    plan = Plan(strategies=(BatchNormReplay(micro_batch_size=12),))
    plain, _ = fitted(normed)
    split, _ = fitted(normed, MemfitCallback(plan=plan))

    assert difference(plain, split) < 1e-12


def test_labels_that_are_ignored_do_not_count() -> None:
    plain, one = fitted(Tagger, data=tagged)
    split, other = fitted(Tagger, MemfitCallback(plan=SPLIT), data=tagged)

    assert difference(plain, split) < 1e-12
    accuracy = one.callback_metrics["accuracy"].item()
    assert other.callback_metrics["accuracy"].item() == pytest.approx(accuracy)


def test_a_count_of_the_users_own_weights_pieces() -> None:
    callback = MemfitCallback(plan=SPLIT, count=lambda batch: (batch[1] != -100).sum())
    plain, _ = fitted(Tagger, data=tagged)
    split, _ = fitted(Tagger, callback, data=tagged)

    assert difference(plain, split) < 1e-12


def test_metrics_and_logged_values_are_those_of_whole_batches(tmp_path: Any) -> None:
    rows = []
    for name, callbacks in (("plain", ()), ("split", (MemfitCallback(plan=SPLIT),))):
        logger = CSVLogger(tmp_path, name=name)
        fitted(Measured, *callbacks, logger=logger, log_every_n_steps=1)
        with open(f"{logger.log_dir}/metrics.csv") as file:  # noqa: PTH123 - Lightning's own name
            found = [row for row in csv.DictReader(file) if not row.get("memory/ooms")]
        rows.append([{k: v for k, v in row.items() if "memory/" not in k} for row in found])

    assert len(rows[0]) == len(rows[1]) > 8
    for one, other in zip(*rows, strict=True):
        numbers = {name: float(value) for name, value in one.items() if value}
        assert {n: float(v) for n, v in other.items() if v} == pytest.approx(numbers, abs=1e-6)


def test_batches_of_a_window_may_count_by_their_samples() -> None:
    module, _ = fitted(
        Classifier,
        MemfitCallback(plan=SPLIT, exact_windows=True),
        accumulate_grad_batches=4,
        max_epochs=1,
    )
    # All 100 samples are one window, so that one step on all of them is the same.
    torch.manual_seed(0)
    whole, _ = fitted_on_all()

    assert difference(module, whole) < 1e-12


def fitted_on_all() -> tuple[Any, Any]:
    import lightning as L
    from tests.zoo.lightning_modules import trainer

    L.seed_everything(0, verbose=False)
    module, made = Classifier(), trainer(max_epochs=1, precision="64-true")
    made.fit(module, DataLoader(samples(100, torch.float64), batch_size=100))
    return module, made


def test_data_that_can_be_read_once_is_planned_with_its_first_batch() -> None:
    def stream(num_samples: int, dtype: torch.dtype) -> Stream:
        return Stream(samples(num_samples, dtype))

    import lightning as L
    from tests.zoo.lightning_modules import trainer

    found = []
    for callbacks in ((), (MemfitCallback(plan=SPLIT),)):
        L.seed_everything(0, verbose=False)
        module = Classifier()
        made = trainer(*callbacks, precision="64-true")
        made.fit(module, DataLoader(stream(100, torch.float64), batch_size=32))
        found.append(module)

    assert 0 < difference(*found) < 1e-12
