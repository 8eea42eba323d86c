"""A training under a plan has the weights and the logs of the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tests.zoo.trainers import bert, difference, losses, texts, trainer

from memfit.integrations.transformers import MemfitTrainerMixin, attach
from memfit.integrations.transformers.training_step import Weighting
from memfit.strategies import ActivationCheckpointing, MicroBatching
from memfit.strategies.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=3),))


def trained(name: str, plan: Plan | None, **options: Any) -> Any:
    found = trainer(name, **options)
    if plan is not None:
        attach(found, plan=plan)
    found.train()
    return found


@pytest.mark.parametrize("windows", [1, 2])
def test_without_strategies_all_bits_are_the_same(windows: int) -> None:
    options = {"gradient_accumulation_steps": windows}
    plain, guarded = (trained("bert", plan, **options) for plan in (None, Plan()))

    assert difference(plain.model, guarded.model) == 0
    assert plain.state.log_history[0]["grad_norm"] == guarded.state.log_history[0]["grad_norm"]
    assert losses(plain) == losses(guarded)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert", {}),
        ("bert", {"gradient_accumulation_steps": 2}),  # the last window has one short batch
        ("bert", {"max_grad_norm": 0.0, "weight_decay": 0.1}),
        ("llama", {"gradient_accumulation_steps": 2}),
        ("lora", {"gradient_accumulation_steps": 2}),
        ("tagger", {"gradient_accumulation_steps": 2}),
        ("llama", {"label_smoothing_factor": 0.1}),
    ],
    ids=str,
)
def test_pieces_of_uneven_batches_add_up(name: str, options: dict[str, Any]) -> None:
    plain, split = (trained(name, plan, **options) for plan in (None, SPLIT))

    assert 0 < difference(plain.model, split.model) < 1e-12
    assert losses(split) == pytest.approx(losses(plain), abs=2e-6)  # they are added up in fp32


def test_single_precision_differs_by_rounding() -> None:
    plain, split = (trained("llama", plan, dtype=torch.float32) for plan in (None, SPLIT))

    assert difference(plain.model, split.model) < 1e-6


def test_a_sum_over_the_windows_items_is_no_mean() -> None:
    """A causal model divides by what it is handed; a classifier is handed it and does not."""
    found = {}
    for name in ("llama", "bert"):
        made = trainer(name, max_steps=1)
        attached = attach(made, plan=SPLIT, rehearse=False)
        made.train()
        assert attached._step is not None
        found[name] = attached._step.weighting

    assert found == {"llama": Weighting.SUM, "bert": Weighting.SAMPLES}


def test_a_class_of_trainers_takes_the_plan_itself() -> None:
    from transformers import Trainer

    class Fitted(MemfitTrainerMixin, Trainer):  # type: ignore[misc]  # transformers is untyped
        pass

    plain = trained("bert", None)
    plan = Plan(strategies=(*SPLIT.strategies, ActivationCheckpointing(blocks=("bert.encoder",))))
    made = trainer("bert", Fitted, memfit={"plan": plan})
    made.train()

    assert made.memfit.plan == plan
    assert difference(plain.model, made.model) < 1e-12


def test_parameters_that_are_trained_later_are_planned_anew() -> None:
    from transformers import TrainerCallback

    class Unfreezing(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            model.bert.requires_grad_(False)

        def on_epoch_begin(self, args: Any, state: Any, *_: Any, model: Any, **__: Any) -> None:
            model.bert.requires_grad_(state.epoch is not None and state.epoch >= 1)

    options = {"num_train_epochs": 2, "callbacks": [Unfreezing()]}
    plain = trained("bert", None, **options)
    made = trainer("bert", **options)
    attached = attach(made, plan=SPLIT)
    made.train()

    assert attached.num_plans == 2
    assert difference(plain.model, made.model) < 1e-12


def test_what_a_loss_logs_is_logged_once_per_batch() -> None:
    from tests.zoo.strangers_trainers import Distilling

    plain, split = (
        trained("bert", plan, kind=Distilling, teacher=bert(), dtype=torch.float64)
        for plan in (None, SPLIT)
    )

    assert difference(plain.model, split.model) < 1e-12
    assert len(plain.state.log_history) == len(split.state.log_history)
    for one, other in zip(plain.state.log_history, split.state.log_history, strict=True):
        for name in ("ce", "kd"):
            assert other.get(name) == pytest.approx(one.get(name), abs=1e-9)


def test_data_that_can_be_read_once_is_planned_with_its_first_window() -> None:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(texts(21))

    options = {"max_steps": 3, "train_dataset": Stream()}
    plain, split = (trained("bert", plan, **options) for plan in (None, SPLIT))

    assert difference(plain.model, split.model) < 1e-12
