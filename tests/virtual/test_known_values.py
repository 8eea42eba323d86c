"""Values of host data are known beside fake tensors; others are answered, and listed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.virtual.assumptions import Assumptions
from memfit.virtual.known_values import KnownValues, value_of
from memfit.virtual.tensors import virtual_tensors
from memfit.virtual.with_values import with_values


@pytest.fixture
def assumptions():
    """Make tensors fake until the test ends; give what is assumed meanwhile."""
    assumed = Assumptions()
    with virtual_tensors(None, make_mode=with_values(assumed)):
        yield assumed


def test_what_is_made_of_data_is_computed(assumptions):
    data = torch.from_numpy(np.arange(12).reshape(3, 4))
    mask = data % 3 == 1
    assert isinstance(mask, FakeTensor)
    assert mask.sum().item() == 4
    assert data[mask].tolist() == [1, 4, 7, 10]
    assert torch.unique(data % 3).shape == (3,)
    assert mask.nonzero().shape == (4, 2)
    assert f"{data.sum():d}" == "66"
    assert not assumptions.answers


def test_changes_in_place_reach_views_and_what_is_unknown_forgets(assumptions):
    counts = torch.zeros(4)
    part = counts[1:3]
    part += 2
    assert counts.tolist() == [0, 2, 2, 0]
    counts[0] = torch.randn(200, 200).sum()
    assert counts.tolist() == [1, 1, 1, 1]  # nobody knows what was written, so all is answered
    assert [answer.operator for answer in assumptions.answers] == ["values"]
    assert part.sum().item() == 1.0


def test_a_constant_is_changed_once(assumptions):
    number = torch.tensor([1, 2, 3])
    number += 1
    number.add_(1)
    assert number.tolist() == [3, 4, 5]


def test_real_data_of_the_script_is_really_changed(assumptions):
    array = np.ones(3)
    data = torch.from_numpy(array)
    data.mul_(2)
    assert array.tolist() == [2, 2, 2]
    data.numpy()[0] = 7
    assert array.tolist() == [7, 2, 2]


def test_parameters_are_unknown_and_finite(assumptions):
    layer = torch.nn.Linear(4, 4)
    out = layer(torch.ones(2, 4)).sum()
    assert not torch.isnan(out)
    assert not torch.isinf(out)
    assert torch.isfinite(out)
    assert out.item() == 1.0
    assert float(out.detach()) == 1.0
    assert f"{out:.2f}" == "1.00"
    assert bool(out > 3)


@pytest.mark.slow
def test_a_loop_that_asks_until_it_hears_no_ends(assumptions):
    times = 0
    while (torch.randn(100, 100) > 2).any():
        times += 1
        assert times < 5000
    assert times > 0


@pytest.mark.parametrize(("is_skewed", "count"), [(False, 25), (True, 100)])
def test_choices_are_spread_evenly_or_all_the_same(is_skewed, count):
    assumed = Assumptions(is_skewed=is_skewed)
    with virtual_tensors(None, make_mode=with_values(assumed)):
        scores = torch.randn(100, 100) @ torch.randn(100, 4)
        chosen = scores.topk(2).indices
        assert chosen.shape == (100, 2)
        assert all(first != second for first, second in chosen.tolist())
        first = scores.argmax(-1)
        assert scores[first == 0].shape == (count, 4)
        assert scores[scores > 0].numel() == (400 if is_skewed else 200)
    assert assumed.decide_sizes


def test_random_numbers_are_those_of_a_real_run():
    def drawn():
        torch.manual_seed(5)
        model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.LSTM(10, 20))
        torch.nn.init.trunc_normal_(model[0].weight)
        torch.nn.functional.dropout(torch.randn(50, 100), 0.3)
        return torch.randperm(50).tolist(), torch.rand(3).tolist(), torch.randint(9, (4,)).tolist()

    real = drawn()
    with virtual_tensors(None, make_mode=with_values(Assumptions())):
        assert drawn() == real


def test_what_lies_in_memory_that_nobody_wrote_is_zero(assumptions):
    assert torch.empty(5).tolist() == [0, 0, 0, 0, 0]
    assert torch.empty_like(torch.zeros(3)).sum().item() == 0


def test_an_older_value_is_forgotten_without_the_newer_one():
    values = KnownValues()
    with virtual_tensors(None, make_mode=with_values(Assumptions())):
        fake = torch.empty(3)
    older, newer = torch.zeros(3), torch.ones(3)
    values.attach(fake, older)
    values.attach(fake, newer)
    values._forget(older.untyped_storage()._cdata)  # what lay there may be another's by now
    assert value_of(fake) is newer
    values._forget(newer.untyped_storage()._cdata)
    assert value_of(fake) is None
