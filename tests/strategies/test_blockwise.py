"""Strategies that change some blocks of a model: which ones they take, and what they leave behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.conformance import builders
from tests.zoo.small_jobs import facts_of
from torch import nn

from memfit.session.forwards import replace_forward
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.activation_offload import ActivationOffload

EACH = pytest.mark.parametrize(
    "strategy", [ActivationCheckpointing(), ActivationOffload(to="disk")], ids=lambda s: s.name
)


@EACH
def test_without_names_the_outermost_blocks_are_taken(strategy):
    facts = replace(facts_of(builders.residual()), block_levels=(("2", "0"), ("0.up",)))
    assert strategy.block_names(facts) == ["2", "0"]
    assert strategy.obstacle(facts) is None


@EACH
@pytest.mark.parametrize(
    ("blocks", "sentence"),
    [
        (("a.b", "a-b", "a"), "a.b lies inside a; name one of the two."),
        (("a.b", "a.bc", "a-b"), None),
        (("a", "c"), "the model has no module named 'c'"),
    ],
    ids=["nested", "beside each other", "unknown"],
)
def test_named_blocks_must_be_there_and_lie_beside_each_other(strategy, blocks, sentence):
    names = ("a", "a-b", "a.b", "a.bc")
    facts = replace(facts_of(builders.residual()), module_names=names)
    found = replace(strategy, blocks=blocks).obstacle(facts)
    assert (found or "").startswith(sentence or "")
    assert (found is None) == (sentence is None)


@EACH
def test_a_model_without_repeated_blocks_has_to_have_them_named(strategy):
    assert "so name the blocks" in strategy.obstacle(facts_of(builders.one_layer()))


def test_a_forward_is_put_back_as_it_was():
    layer = nn.Identity()
    outer = replace_forward(layer, lambda x: x + 1)
    own = layer.forward
    inner = replace_forward(layer, lambda x: own(x) * 10)
    assert layer(1) == 20
    inner()
    assert layer.forward is own
    outer()
    assert "forward" not in vars(layer)
    assert layer(1) == 1
