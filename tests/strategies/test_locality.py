"""What counts as treating positions apart, and what does not whatever its name."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.strategies.tiling.tileable import (
    EffectfulBlock,
    dims_of_call,
    find_tileable_blocks,
    judged_blocks,
)
from memfit.virtual.tensors import virtual_tensors


class MLP(nn.Module):
    """Do something between two layers over features."""

    def __init__(self, between) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.of_positions = nn.Parameter(torch.ones(7, 8))
        self.over_positions = nn.Linear(7, 7)
        self.count = 0
        self.register_buffer("seen", torch.zeros(()))
        self.between = between

    def forward(self, x):
        return self.last(self.between(self, self.first(x)))


MASK = torch.ones(7, 1)


def counted(module, x):
    module.count += 1
    return x


MIXING = {
    "mixer": lambda m, x: m.over_positions(x.transpose(1, 2)).transpose(1, 2),
    "roll": lambda m, x: x.roll(1, 1),
    "shift": lambda m, x: torch.cat([x[:, :1] * 0, x[:, :-1]], 1),
    "padded-shift": lambda m, x: F.pad(x, (0, 0, 1, 0))[:, :-1],
    "flip": lambda m, x: x.flip(1),
    "sort": lambda m, x: x.sort(1)[0],
    "cumsum": lambda m, x: x.cumsum(1),
    "softmax-over-tokens": lambda m, x: x.softmax(1),
    "mean-over-tokens": lambda m, x: x - x.mean(1, keepdim=True),
    "mean-over-all": lambda m, x: x - x.mean(),
    "max-over-tokens": lambda m, x: x + x.amax(1, keepdim=True),
    "norm-over-tokens": lambda m, x: F.layer_norm(x, x.shape[1:]),
    "batch-norm": lambda m, x: F.batch_norm(x.transpose(1, 2), None, None, training=True).mT,
    "squeeze-and-excite": lambda m, x: x * torch.sigmoid(m.last(x.mean(1, keepdim=True))),
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x),
    "gram": lambda m, x: x @ x.transpose(1, 2) @ x,
    "contraction": lambda m, x: torch.einsum("btd,bsd->bts", x, x) @ x,
    "positions-added": lambda m, x: x + m.of_positions[: x.shape[1]],
    "positions-counted": lambda m, x: x * torch.arange(x.shape[1], device=x.device)[:, None],
    "divided-by-tokens": lambda m, x: x / x.shape[1],
    "divided-by-tokens-in-a-tensor": lambda m, x: (
        x * torch.arange(x.shape[1], device=x.device).float().mean()
    ),
    "divided-by-tokens-in-a-constant": lambda m, x: x / torch.tensor(float(x.shape[1])),
    "divided-by-tokens-unseen": lambda m, x: x / x.new_tensor(float(x.shape[1])),
    "mask-from-elsewhere": lambda m, x: x * MASK,
    "rows-turned": lambda m, x: x.reshape(-1, 8).t().reshape(x.shape),
    "extents-assumed": lambda m, x: x.view(-1, 35, 8).mean(1, keepdim=True).expand(-1, 35, 8),
    "drop-path": lambda m, x: x * torch.rand((x.shape[0], 1, 1), device=x.device),
    "dropped-tokens": lambda m, x: F.dropout1d(x, 0.5, training=True),
    "one-draw-for-all": lambda m, x: x * torch.rand((), device=x.device),
    "buffer-changed": lambda m, x: x + m.seen.add_(1.0),
    "attribute-changed": counted,
    "values-looked-at": lambda m, x: x if x.sum() > 0 else -x,
}
POINTWISE = {
    "nothing": lambda m, x: x,
    "gelu": lambda m, x: F.gelu(x),
    "in-place": lambda m, x: x.relu_().mul_(2.0),
    "layer-norm": lambda m, x: m.norm(x),
    "rms-norm": lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "swiglu": lambda m, x: F.silu(m.last(x)) * m.first(x),
    "chunks": lambda m, x: torch.cat([part.relu() for part in x.chunk(2, dim=-1)], dim=-1),
    "groups-of-features": lambda m, x: x.view(*x.shape[:-1], 2, 4).softmax(-1).flatten(-2),
    "flattened": lambda m, x: m.first(x.reshape(-1, 8)).view(x.shape),
    "product": lambda m, x: x @ m.first.weight,
    "constant": lambda m, x: x / torch.tensor(2.0),
    "softmax-over-features": lambda m, x: x.softmax(-1),
    "feature-parameter": lambda m, x: x * m.of_positions[0] + m.first.bias.sum(),
}


def names_in(module) -> list[str]:
    return [block.name for block in find_tileable_blocks(module)]


@pytest.mark.parametrize("between", MIXING.values(), ids=MIXING)
def test_a_module_that_mixes_positions_is_not_taken_for_an_mlp(between):
    mlp = MLP(between)
    assert names_in(mlp) == []
    assert dims_of_call(mlp, mlp.forward, (4, 7, 8)) is None
    assert mlp.count == 0
    assert mlp.seen == 0


@pytest.mark.parametrize("between", POINTWISE.values(), ids=POINTWISE)
@pytest.mark.parametrize("shape", [(7, 8), (4, 7, 8), (2, 4, 7, 8)], ids=str)
def test_a_module_that_treats_positions_apart_is_found(between, shape):
    mlp = MLP(between)
    found = dims_of_call(mlp, mlp.forward, shape)
    assert names_in(mlp) == [""]
    assert found is not None
    assert found.dims == tuple(range(len(shape) - 1))
    assert (found.halo, found.draws) == (0, False)


def conv(channels_in, channels_out, size, **settings):
    return nn.Conv2d(channels_in, channels_out, size, **settings)


UNTILEABLE = {
    "stride": [conv(3, 8, 3, padding=1, stride=2), nn.ReLU(), conv(8, 3, 1)],
    "no-padding": [conv(3, 8, 3), nn.ReLU(), conv(8, 3, 1)],
    "circular": [conv(3, 8, 3, padding=1, padding_mode="circular"), nn.ReLU(), conv(8, 3, 1)],
    "group-norm": [conv(3, 8, 3, padding=1), nn.GroupNorm(2, 8), conv(8, 3, 1)],
    "batch-norm": [conv(3, 8, 3, padding=1), nn.BatchNorm2d(8), conv(8, 3, 1)],
    "pooling": [conv(3, 8, 3, padding=1), nn.MaxPool2d(3, 1, 1), conv(8, 3, 1)],
    "dropout-before-a-halo": [conv(3, 8, 1), nn.Dropout(0.1), conv(8, 3, 3, padding=1)],
    "dropped-channels": [conv(3, 8, 3, padding=1), nn.Dropout2d(0.5), conv(8, 3, 1)],
    "input-changed": [nn.ReLU(inplace=True), conv(3, 8, 3, padding=1), conv(8, 3, 1)],
    "even-kernel": [conv(3, 8, 4, padding="same"), nn.ReLU(), conv(8, 3, 1)],
    "transposed": [nn.ConvTranspose2d(3, 8, 3, padding=1), nn.ReLU(), conv(8, 3, 1)],
}


@pytest.mark.parametrize("layers", UNTILEABLE.values(), ids=UNTILEABLE)
def test_what_couples_places_of_an_image_is_not_tiled(layers):
    chain = nn.Sequential(*layers)
    assert names_in(chain) == []
    assert dims_of_call(chain, chain.forward, (2, 3, 16, 16)) is None


def test_the_halo_adds_up_along_a_chain_and_is_the_largest_of_parallel_paths():
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.thin = conv(3, 3, 5, padding=4, dilation=2), conv(3, 3, 3, padding=1)

        def forward(self, x):
            return x + self.wide(x) * torch.sigmoid(self.thin(x))

    chain = nn.Sequential(Parallel(), nn.ReLU(), conv(3, 3, (3, 1), padding="same"))
    assert dims_of_call(chain, chain.forward, (2, 3, 32, 16)).halo == 5
    along_width = dims_of_call(chain, chain.forward, (2, 3, 16, 32))
    assert (along_width.dims, along_width.halo) == ((3,), 4)


def test_a_dimension_that_mixes_is_left_for_another():
    chain = nn.Sequential(conv(3, 8, 3, padding=1), nn.Softmax(dim=2), conv(8, 3, 3, padding=1))
    assert dims_of_call(chain, chain.forward, (2, 3, 32, 16)).dims == (3,)


def test_channels_may_be_last_in_between():
    class NormOfChannels(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class Pointwise(nn.Linear):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    chain = nn.Sequential(conv(4, 4, 7, padding=3, groups=4), NormOfChannels(4), Pointwise(4, 4))
    assert dims_of_call(chain, chain.forward, (2, 4, 32, 16)).halo == 3


def test_dropout_is_noticed_where_it_draws():
    mlp = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))
    assert find_tileable_blocks(mlp)[0].draws
    assert not find_tileable_blocks(mlp.eval())[0].draws


def test_the_outermost_blocks_are_found_and_bare_layers_are_not():
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(9, 8), "blocks": nn.ModuleList([block]), "head": nn.Linear(8, 9)}
    )
    assert names_in(model) == ["blocks.0"]


def test_a_block_with_hooks_inside_is_left_alone_as_they_would_be_called_per_tile():
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    mlp.register_forward_hook(lambda module, args, out: None)
    assert names_in(mlp) == [""]
    mlp[0].register_forward_hook(lambda module, args, out: None)
    assert names_in(mlp) == []


def test_blocks_that_differ_in_a_rate_are_told_apart():
    class Dropping(nn.Sequential):
        def __init__(self, rate: float) -> None:
            super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.rate = rate

        def forward(self, x):
            return F.dropout(super().forward(x), self.rate, self.training)

    model = nn.ModuleList([Dropping(0.0), Dropping(0.1)])
    assert [block.draws for block in find_tileable_blocks(model)] == [False, True]


def test_another_default_dtype_makes_no_difference():
    torch.set_default_dtype(torch.float64)
    try:
        assert names_in(MLP(POINTWISE["swiglu"])) == [""]
    finally:
        torch.set_default_dtype(torch.float32)


def test_looking_leaves_no_trace():
    mlp = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    members = [id(parameter) for parameter in mlp.parameters()]
    before = torch.get_rng_state()
    find_tileable_blocks(mlp)
    assert torch.equal(torch.get_rng_state(), before)
    assert [id(parameter) for parameter in mlp.parameters()] == members


def test_virtual_models_are_judged_like_real_ones():
    with virtual_tensors():
        assert names_in(MLP(POINTWISE["swiglu"])) == [""]
        assert names_in(MLP(MIXING["roll"])) == []


class Effectful(nn.Module):
    """An MLP with an effect."""

    def __init__(self, effect) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.source, self.numbers, self.num_calls = torch.Generator(), np.random.default_rng(1), 0
        self.seen: list[int] = []
        self.effect = effect

    def forward(self, x):
        return self.effect(self, self.layers(x))


def counted(block, x):
    block.num_calls += 1
    return x


def listed(block, x):
    block.seen.append(len(x))
    return x


EFFECTS = {
    "changes num_calls": counted,
    "changes seen": listed,
    "draws from random": lambda block, x: x * random.random(),
    "draws from numpy": lambda block, x: x * float(np.random.rand()),
    "draws from numbers": lambda block, x: x * float(block.numbers.random()),
    "draws from a torch.Generator": lambda block, x: (
        x * torch.empty_like(x).bernoulli_(0.5, generator=block.source)
    ),
}


@pytest.mark.parametrize("sentence", EFFECTS)
def test_blocks_with_effects_are_not_tiled_and_asking_changes_nothing(sentence):
    block = Effectful(EFFECTS[sentence])
    before = (random.getstate(), repr(np.random.get_state()), block.source.get_state().tolist())
    judged = judged_blocks(nn.Sequential(block))
    told = [each.sentence for each in judged if isinstance(each, EffectfulBlock)]
    assert any(each.startswith(f"0 {sentence}") for each in told)
    assert [block.num_calls, block.seen] == [0, []]
    assert before == (
        random.getstate(),
        repr(np.random.get_state()),
        block.source.get_state().tolist(),
    )
