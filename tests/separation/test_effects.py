"""What a step changes besides gradients and what the optimizer keeps is found without running it."""

from __future__ import annotations

import copy
import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo.stateful_modules import SAMPLES, Counting, batch, job, linear, mean_square
from torch import nn

from memfit.analysis.effects import Effect, EffectKind, Effects
from memfit.job import Job
from memfit.live_state import LiveState
from memfit.separation.effects import find_effects
from memfit.session.batches import find_layout

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
ONLY_IN_THE_FIRST_STEP = ("hook_that_removes_itself",)


def effects_of(made: Job) -> Effects:
    return find_effects(made, find_layout(made))


def names(effects: Effects) -> list[str]:
    return [effect.full_name for effect in effects]


@pytest.mark.parametrize("name", SAMPLES)
def test_all_that_a_step_changes_is_named_and_nothing_else(name: str) -> None:
    expected = () if name in ONLY_IN_THE_FIRST_STEP else SAMPLES[name].changes
    found = names(effects_of(SAMPLES[name].build()))
    for each in expected:
        assert any(each in full_name for full_name in found), (each, found)
    for full_name in found:
        known = any(each.rpartition(".")[0] in full_name for each in expected)
        assert known, f"{full_name} does not change"


@pytest.mark.parametrize("name", [name for name, each in SAMPLES.items() if each.lines])
def test_the_line_where_an_operator_writes_is_told(name: str) -> None:
    found = effects_of(SAMPLES[name].build())
    file = Path(__file__).parents[1] / "zoo" / "stateful_modules.py"
    lines = {
        linecache.getline(str(file), int(e.source_line.rpartition(":")[2] or 0)) for e in found
    }
    for comment in SAMPLES[name].lines:
        assert any(comment in line for line in lines), (comment, lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_asking_changes_nothing(name: str) -> None:
    made = SAMPLES[name].build()
    roots = {"model": made.model, "loss": made.loss, "optimizer": made.optimizer}
    before = LiveState(roots).snapshot()
    effects_of(made)
    assert before.changes() == ()


def live_job(model: nn.Module, **given: Any) -> Job:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return job(lambda: model, optimizer=lambda _: optimizer, **given)


def test_asking_leaves_objects_that_were_there_already_as_they_were() -> None:
    model = nn.Sequential(Counting(), nn.BatchNorm1d(3))
    before = copy.deepcopy(model.state_dict())
    made = live_job(model)
    found = names(effects_of(made))
    assert "model.0.calls" in found
    assert "model.1.running_mean" in found
    assert (model[0].calls, model[0].seen) == (0, 0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert type(model[0].layer.weight) is nn.Parameter
    optimizer = made.optimizer([])
    assert dict(optimizer.state) == {}


def test_a_plain_step_has_no_effects() -> None:
    assert effects_of(job(lambda: nn.Sequential(linear(), nn.ReLU()))).sentences() == ()


def test_batch_norm_that_evaluates_has_no_effects() -> None:
    model = lambda: nn.BatchNorm1d(6).eval()  # noqa: E731
    assert names(effects_of(job(model))) == []


def test_dropout_draws_from_the_global_generator() -> None:
    (effect,) = effects_of(job(lambda: nn.Sequential(linear(), nn.Dropout(0.5))))
    assert effect.is_global_draw
    assert effect.full_name == "torch's global generator"
    assert effect.depends_on_batch


def test_dropout_of_nothing_draws_nothing() -> None:
    assert len(effects_of(job(lambda: nn.Sequential(linear(), nn.Dropout(0.0))))) == 0


def test_what_counts_samples_depends_on_the_batch_and_what_counts_calls_does_not() -> None:
    found = {effect.name: effect for effect in effects_of(job(Counting))}
    assert found["calls"].depends_on_batch is False
    assert found["seen"].depends_on_batch is True


def test_a_loss_that_takes_an_even_number_of_samples_is_looked_at_all_the_same() -> None:
    def in_halves(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        batch.unflatten(0, (2, -1))  # fails for an odd number of samples
        return mean_square(model, batch)

    found = effects_of(job(Counting, loss=in_halves))

    assert {effect.name: effect.depends_on_batch for effect in found} == {
        effect.name: effect.depends_on_batch for effect in effects_of(job(Counting))
    }


def test_a_parameter_written_in_a_hook_is_told_of_and_one_written_by_the_optimizer_is_not() -> None:
    def build() -> nn.Module:
        model = linear()

        def shrink(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter.mul_(0.5)

        model.weight.register_post_accumulate_grad_hook(shrink)
        return model

    (effect,) = effects_of(job(build))
    assert (effect.full_name, effect.kind) == ("model.weight", EffectKind.TENSOR)
    assert "test_effects.py" in effect.source_line


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_what_an_optimizer_keeps_is_no_effect(optimizer: Any) -> None:
    assert effects_of(job(linear, optimizer=lambda p: optimizer(p, lr=0.1))).sentences() == ()


def test_a_tensor_of_the_loss_that_is_written_is_an_effect() -> None:
    centre = torch.zeros(3)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        centre.mul_(0.9).add_(out.detach().mean(0))
        return (out - centre).square().mean()

    (effect,) = effects_of(job(linear, loss=loss))
    assert effect.full_name == "loss.centre"
    assert torch.equal(centre, torch.zeros(3))


def test_reading_a_file_is_said_to_be_unseen(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("1\n1\n1\n1\n1\n")
    with (tmp_path / "weights").open() as file:

        def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return mean_square(model, x) * float(file.readline() or 1)

        (sentence,) = effects_of(job(linear, loss=loss)).sentences()
    assert sentence.startswith("loss.file is")


def test_sentences_name_thing_line_and_limits() -> None:
    effect = Effect(
        owner="model.encoder",
        name="calls",
        kind=EffectKind.ATTRIBUTE,
        source_line="train.py:12",
        depends_on_batch=True,
        is_restorable=False,
    )
    assert effect.sentence() == (
        "The step sets model.encoder.calls (train.py:12); it depends on the batch and it cannot be "
        "put back."
    )
    effects = Effects(effects=(effect,), unseen=("A file.",))
    assert effects.sentences() == (effect.sentence(), "A file.")
    assert effects.of("model") == effects.writes == (effect,)
    assert effects.of("loss") == effects.draws == ()


def test_batches_are_built_without_leaving_a_trace() -> None:
    rows = torch.randn(20, 6)
    place = [0]

    def draw(size: int) -> torch.Tensor:
        place[0] += size
        return rows[:size] + batch(size)

    state = torch.get_rng_state()
    assert effects_of(job(linear, batch=draw)).sentences() == ()
    made = job(linear, batch=draw)
    layout = find_layout(made)
    here = place[0]
    find_effects(made, layout)
    assert place[0] == here
    assert torch.equal(torch.get_rng_state(), state)
