"""A Trainer is predicted and planned as it is, and left as it was; what has no window is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from tests.zoo import strangers_trainers as strangers
from tests.zoo.trainers import difference, texts, trainer

from memfit.cli.main import main
from memfit.errors import MemfitError, StrategyError
from memfit.integrations.transformers import attach, fit, plan, predict
from memfit.integrations.transformers.supported import check_is_trainer, check_supported
from memfit.strategies import MicroBatching
from memfit.strategies.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")
SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=3),))


@pytest.mark.slow
def test_a_plan_for_half_the_peak_trains_inside_it() -> None:
    """Predicted is measured on the largest batch, and the weights are those of the plain one."""
    longest = sorted(texts(40, "tokens"), key=lambda row: -len(row["input_ids"]))[:8]
    options = {"dtype": torch.float32, "train_dataset": longest * 3}
    made = trainer("llama", **options)
    before = [value.clone() for value in made.model.state_dict().values()]
    attributes = dict(vars(made))
    plain = predict(made)
    found = plan(made, budget=plain.peak_allocated_bytes // 2)

    same = zip(before, made.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
    assert vars(made) == attributes
    assert made.optimizer is None
    assert found.prediction is not None

    attached = attach(made, plan=Plan(), rehearse=False)
    made.train()
    assert attached.measured_peak_bytes == pytest.approx(plain.peak_allocated_bytes, rel=0.01)
    other = trainer("llama", **options)
    attached = attach(other, plan=found, rehearse=False)
    other.train()

    measured = attached.measured_peak_bytes
    assert measured is not None
    assert measured <= plain.peak_allocated_bytes // 2
    assert found.prediction.peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    assert difference(made.model, other.model) < 1e-6


@pytest.mark.slow
def test_fit_plans_and_trains_and_leaves_the_trainer_alone() -> None:
    made = trainer("bert", max_steps=2)
    result = fit(made, "1GiB")

    assert result.global_step == 2
    assert not {"training_step", "get_batch_samples", "_memfit"} & vars(made).keys()
    assert "step" not in vars(made.optimizer) or made.optimizer.step.__name__ != "replaced"


@pytest.mark.slow
@pytest.mark.parametrize("planned_first", [True, False])
def test_each_training_goes_on_from_the_others_checkpoint(
    tmp_path: Path, *, planned_first: bool
) -> None:
    plain = trainer("llama", max_steps=4)
    plain.train()
    options = {"max_steps": 4, "output_dir": str(tmp_path), "save_strategy": "steps"}
    first = trainer("llama", save_steps=2, **options)
    if planned_first:
        attach(first, plan=SPLIT)
    first.train()
    second = trainer("llama", save_steps=9, **options)
    if not planned_first:
        attach(second, plan=SPLIT)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    groups = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt")["param_groups"]
    assert [group["foreach"] for group in groups] == [None, None]
    assert second.state.global_step == 4
    assert difference(plain.model, second.model) < 1e-12


@pytest.mark.slow
def test_the_command_plans_a_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    root = Path(__file__).parents[3]
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(root)!r})\n"
        "from tests.zoo.trainers import trainer\n\n\ndef make():\n    return trainer('bert')\n"
    )

    assert main(["plan", f"{file}:make", "--budget", "1GiB", "--json"]) == 0
    written = capsys.readouterr().out
    found = json.loads(written[written.index("{") :])
    assert found["peak_allocated_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (strangers.ClassWeighted, "mean over items whose number or weight differs"),
        (strangers.Contrastive, "compares samples of the batch with one another"),
        (strangers.Focal, "applies a function to a sum over the batch"),
        (strangers.Balanced, "applies a function to a sum over the batch"),
        (strangers.Ranking, "takes some samples out of the batch"),
    ],
)
def test_losses_that_couple_samples_are_not_cut(kind: Any, reason: str) -> None:
    made = trainer("bert", kind, train_dataset=texts(24))
    attach(made, plan=SPLIT)

    with pytest.raises(StrategyError, match=reason):
        made.train()


@pytest.mark.slow
def test_a_loss_of_its_own_past_is_not_cut() -> None:
    made = trainer("bert", strangers.Momentum, train_dataset=texts(24))
    attach(made, plan=SPLIT)

    with pytest.raises(MemfitError, match="does not keep the results"):
        made.train()


@pytest.mark.slow
def test_batches_with_texts_are_not_cut() -> None:
    from tests.zoo.trainers import padded

    def with_texts(rows: Any) -> Any:
        return {**padded(rows), "texts": ["x" * len(row["input_ids"]) for row in rows]}

    made = trainer("bert", strangers.WithTexts, data_collator=with_texts, train_dataset=texts(24))
    attach(made, plan=SPLIT)

    with pytest.raises(StrategyError, match="'texts' of the batch holds a str"):
        made.train()


def test_two_backward_passes_are_refused() -> None:
    with pytest.raises(MemfitError, match="Adversarial has a training_step of its own"):
        predict(trainer("bert", strangers.Adversarial))


@pytest.mark.slow
def test_a_refusal_may_leave_the_training_as_it_is() -> None:
    plain = trainer("bert", strangers.Adversarial)
    plain.train()
    made = trainer("bert", strangers.Adversarial)
    told: list[str] = []
    attach(made, "1GiB", on_refusal=told.append)
    made.train()

    assert "training_step of its own" in told[0]
    assert difference(plain.model, made.model) == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_deepspeed_enabled": True}, "ZeRO-3"),
        ({"is_fsdp_enabled": True}, "engine"),
        ({"is_model_parallel": True}, "several devices"),
        ({"optimizer": SimpleNamespace(train=print)}, "schedule-free"),
        ({"_generate_and_score_completions": None}, "generates its batches"),
    ],
    ids=str,
)
def test_what_has_no_window_is_refused(changes: dict[str, Any], reason: str) -> None:
    made = trainer("bert")
    vars(made).update(changes)

    with pytest.raises(MemfitError, match=reason):
        check_supported(made)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("optim", "lomo", "during backward"), ("torch_compile", True, "compiled")],
)
def test_arguments_that_leave_no_window_are_refused(name: str, value: Any, reason: str) -> None:
    made = trainer("bert")
    setattr(made.args, name, value)

    with pytest.raises(MemfitError, match=reason):
        check_supported(made)


def test_only_a_trainer_is_attached_to() -> None:
    with pytest.raises(MemfitError, match=r"A transformers\.Trainer is needed, not a dict"):
        check_is_trainer({})
