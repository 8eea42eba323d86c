"""Adapters on a 4-bit base that memfit has trained are saved, loaded and merged as PEFT's are."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.zoo import four_bit
from tests.zoo.four_bit import WIDTH
from torch import nn

import memfit

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
"""Of a base that has no configuration, and of rounding when 4-bit weights are merged into."""
NUM_STEPS = 3
EXACT = {"compute": torch.float32}


def base(*, double: bool) -> nn.Module:
    torch.manual_seed(0)
    return four_bit.base(double=double, **EXACT)


@pytest.fixture(params=[True, False], ids=["double", "single"])
def double(request):
    four_bit.library()
    pytest.importorskip("peft")
    return request.param


@pytest.fixture
def trained(double):
    """Train adapters for a few steps."""
    torch.manual_seed(0)
    model = four_bit.with_adapters(base(double=double))
    before = {name: each.clone() for name, each in model.named_parameters()}
    inputs = torch.randn(2, 4, WIDTH)
    with memfit.start(four_bit.job(lambda: model), memfit.Plan()) as run:
        losses = [run.step(inputs).loss.item() for _ in range(NUM_STEPS)]
    assert losses == sorted(losses, reverse=True)
    changed = {n for n, each in model.named_parameters() if not torch.equal(each, before[n])}
    assert changed == {name for name in before if "lora_" in name}
    return model


def loaded(trained, double, folder):
    """Load saved adapters onto a fresh base; evaluation would repack the weights on some CPUs."""
    import peft

    trained.save_pretrained(folder)
    return peft.PeftModel.from_pretrained(base(double=double), folder).train()


def test_loaded_adapters_give_the_same_to_the_bit(trained, double, tmp_path):
    inputs = torch.randn(3, 4, WIDTH)
    plain = base(double=double)(inputs)
    found = loaded(trained, double, tmp_path)(inputs)
    assert torch.equal(found, trained(inputs))
    assert not torch.equal(found, plain)


def test_adapters_merged_into_the_unpacked_base_give_the_same(trained, double, tmp_path):
    """What differs is the order of sums in fp32."""
    inputs = torch.randn(3, 4, WIDTH)
    model = loaded(trained, double, tmp_path)
    expected = model(inputs)
    merged = unpacked_and_merged(model)
    assert {type(each) for each in merged.modules()} & {nn.Linear}
    assert torch.allclose(merged(inputs), expected, rtol=1e-5, atol=1e-5)


def test_adapters_merged_into_packed_weights_are_rounded_with_them(trained, double, tmp_path):
    """The sum is packed anew: the weights are off by a 4-bit code at most."""
    functional = four_bit.library().functional
    model = loaded(trained, double, tmp_path)
    expected = unpacked_and_merged(copy.deepcopy(model))
    merged = model.merge_and_unload()
    for name, layer in expected.named_modules():
        if isinstance(layer, nn.Linear):
            packed = merged.get_submodule(name).weight
            found = functional.dequantize_4bit(packed.data, packed.quant_state)
            largest = layer.weight.reshape(-1, 64).abs().amax(1, keepdim=True)
            apart = (found - layer.weight).reshape(-1, 64).abs()
            assert (apart / largest).max() < 0.16  # half of the widest gap between codes of nf4


def unpacked_and_merged(model):
    """Return plain layers: unpacked weights, and what the adapters add to them."""
    functional = four_bit.library().functional
    base = copy.deepcopy(model.get_base_model())
    for name, layer in list(base.named_modules()):
        if hasattr(layer, "lora_A"):
            packed = layer.base_layer
            weight = functional.dequantize_4bit(packed.weight.data, packed.weight.quant_state)
            plain = nn.Linear(packed.in_features, packed.out_features)
            plain.weight.data = weight + layer.get_delta_weight("default")
            plain.bias.data = packed.bias.data.clone()
            base.set_submodule(name, plain)
    return base
