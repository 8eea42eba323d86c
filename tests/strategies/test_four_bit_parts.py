"""A 4-bit base in a part of a model, where the rest is trained as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.zoo import four_bit
from tests.zoo.four_bit import WIDTH, Block
from torch import nn

import memfit
from memfit import Plan
from memfit.errors import StrategyError
from memfit.strategies import FourBitBase
from memfit.strategies.four_bit_base import merged_state_dict

pytestmark = pytest.mark.usefixtures("packages")
PARTS = FourBitBase(rank=4, alpha=8, only=("1",), freezes="packed", compute_dtype="float32")


@pytest.fixture
def packages():
    four_bit.library()
    pytest.importorskip("peft")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))


def job(model=model_of):
    return replace(
        four_bit.job(model),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def plan(strategy=PARTS) -> Plan:
    return Plan(strategies=(strategy,))


def test_layers_are_packed_inside_the_named_modules_alone_and_the_rest_is_trained():
    model = model_of()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with memfit.start(job(lambda: model), plan()) as run:
        assert type(model[0].rise) is nn.Linear
        assert {name.split(".lora_")[0] for name, _ in model.named_parameters() if "lora" in name} == {
            "1.rise",
            "1.fall",
        }  # fmt: skip
        held = {id(each) for group in run.optimizer.param_groups for each in group["params"]}
        assert held == {id(each) for each in model.parameters() if each.requires_grad}
        for _ in range(2):
            run.step(job().batch(2))
    changed = {
        name for name, each in model.named_parameters() if not torch.equal(each, before[name])
    }
    assert changed == {name for name in before if name not in {"1.rise.bias", "1.fall.bias"}}
    assert all(each.requires_grad for each in model.parameters())
    assert all(id(each) in held or name.startswith("1.") for name, each in model.named_parameters())


def test_the_rest_is_trained_as_it_is_without_packing():
    """One step's gradients of plain layers are those of a model whose packed weights are rounded."""
    rounded, batch = model_of(), job().batch(2)
    functional = four_bit.library().functional
    for layer in (rounded[1].rise, rounded[1].fall):
        packed, state = functional.quantize_4bit(
            layer.weight.data, quant_type="nf4", compress_statistics=True
        )
        layer.weight.data = functional.dequantize_4bit(packed, state)
    optimizer = torch.optim.AdamW(rounded.parameters(), lr=1e-3)
    job().loss(rounded, batch).backward()
    optimizer.step()
    model = model_of()
    with memfit.start(job(lambda: model), plan()) as run:
        run.step(batch)
    for name in ("0.rise.weight", "0.fall.bias", "2.weight"):
        assert torch.allclose(model.get_parameter(name), rounded.get_parameter(name), atol=1e-6)


def test_names_in_groups_stay_beside_their_parameters():
    def named(named_parameters):
        return torch.optim.SGD(list(named_parameters), lr=0.1)

    with memfit.start(replace(job(), optimizer=named), plan()) as run:
        names = {id(each): name for name, each in run.model.named_parameters()}
        (group,) = run.optimizer.param_groups
        assert group["param_names"] == [names[id(each)] for each in group["params"]]


def test_the_merged_state_is_that_of_the_plain_model_once_the_run_is_closed():
    model = model_of()
    with memfit.start(job(lambda: model), plan()) as run:
        run.step(job().batch(2))
        merged = merged_state_dict(run.model)
    plain = model.state_dict()
    assert merged.keys() == plain.keys()
    assert all(torch.allclose(merged[name], plain[name]) for name in plain)
    model_of().load_state_dict(merged)


@pytest.mark.slow
def test_the_prediction_counts_what_stays_trained():
    with memfit.start(job(), plan()) as run:
        run.step(job().batch(job().batch_size))
        measured_bytes = run.measured_peak_bytes
    assert memfit.predict(job(), plan=plan()).peak_allocated_bytes == pytest.approx(
        measured_bytes, rel=0.02
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"only": ("7",)}, "inside a module called 7"),
        ({"only": ("2",)}, "inside a module called 2"),
    ],
)
def test_modules_without_linear_layers_are_refused(settings, words):
    with pytest.raises(StrategyError, match=words):
        memfit.start(job(), plan(replace(PARTS, **settings)))


def test_what_is_frozen_has_two_names():
    with pytest.raises(ValueError, match="freezes must be one of all, packed"):
        FourBitBase(freezes="some")
