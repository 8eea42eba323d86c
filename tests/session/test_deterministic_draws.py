"""Deterministic draws depend neither on their position nor on the random state."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memfit.session.deterministic_draws import DeterministicDraws, untouched_randomness

DRAWS = {
    "rand": lambda: torch.rand(40),
    "randn": lambda: torch.randn(40),
    "rand_like": lambda: torch.rand_like(torch.zeros(40)),
    "randn_like": lambda: torch.randn_like(torch.zeros(40)),
    "normal": lambda: torch.normal(torch.full((40,), 2.0), 3.0),
    "normal_": lambda: torch.empty(40).normal_(2.0, 3.0),
    "uniform_": lambda: torch.empty(40).uniform_(-3.0, -2.0),
    "exponential_": lambda: torch.empty(40).exponential_(),
    "geometric_": lambda: torch.empty(40).geometric_(0.5),
    "bernoulli": lambda: torch.bernoulli(torch.full((40,), 0.3)),
    "bernoulli_": lambda: torch.empty(40).bernoulli_(0.3),
    "random_": lambda: torch.empty(40).random_(5, 9),
    "randint": lambda: torch.randint(5, 9, (40,)),
    "bool mask": lambda: torch.empty(40, dtype=torch.bool).bernoulli_(0.5),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_position_gets_the_same_value_each_time(draw):
    with DeterministicDraws() as draws:
        first, second = draw(), draw()
    assert torch.equal(first, second)
    assert len(first.unique()) == 1
    assert draws.num_draws == 2
    assert not draws.still_random


def test_values_lie_where_their_distribution_does():
    with DeterministicDraws():
        assert -3.0 < DRAWS["uniform_"]()[0] < -2.0
        assert 5 <= DRAWS["randint"]()[0] < 9
        assert 0.0 < DRAWS["rand"]()[0] < 1.0
        assert 2.0 < DRAWS["normal"]()[0] < 5.0
        assert torch.equal(torch.randperm(4), torch.tensor([3, 2, 1, 0]))
        chosen = torch.multinomial(torch.ones(2, 5), 3)
    assert torch.equal(chosen, torch.tensor([[0, 1, 2], [0, 1, 2]]))


@pytest.mark.parametrize(
    "drop",
    [
        nn.Dropout(0.4),
        nn.Dropout1d(0.4),
        lambda x: F.dropout(x, 0.7),
        lambda x: torch.native_dropout(x, 0.4, True)[0] * 0.6,
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.5, batch_first=True),
    ],
    ids=["module", "channels", "function", "kernel", "attention"],
)
def test_dropout_keeps_everything(drop):
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 6, requires_grad=True)
    with DeterministicDraws():
        out = drop(inputs)
        out.sum().backward()
    assert inputs.grad is not None
    if isinstance(drop, nn.TransformerEncoderLayer):
        drop.apply(lambda module: setattr(module, "p", 0.0))
        drop.self_attn.dropout = 0.0
        expected = drop(inputs)
    else:
        expected = inputs
        assert torch.allclose(inputs.grad, torch.ones(()).expand_as(inputs) * inputs.grad[0, 0, 0])
    assert torch.allclose(out, expected, atol=1e-6)


def test_a_rare_distribution_is_named():
    with DeterministicDraws() as draws:
        torch.poisson(torch.ones(3))
    assert draws.still_random == {"poisson"}


def test_all_random_states_are_put_back():
    numpy = pytest.importorskip("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with untouched_randomness():
        torch.rand(3), random.random(), numpy.random.rand(3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]
