"""Operators without a rule are tried hard, and a proof that relies on a trial says so."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tests.separation.linear_jobs import job_with, separation_of

import memfit
from memfit.errors import StrategyError
from memfit.separation.representations import rows_are_apart
from memfit.session.batches import find_layout

_LIBRARY = torch.library.Library("memfit_tests", "DEF")


def operator(name, compute):
    """Register an operator that has no rule, of one tensor, which gives one like it."""
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    _LIBRARY.impl(name, compute, "CPU")
    _LIBRARY.impl(name, torch.empty_like, "Meta")
    return getattr(torch.ops.memfit_tests, name)


def less_the_mean(x, where):
    return torch.where(where, x - x.mean(0, keepdim=True), x)


APART = operator("apart", lambda x: x * x.square().sum(1, keepdim=True))
MIXING = {
    "far values": operator("mixes_far", lambda x: less_the_mean(x, x.abs().amax() > 500)),
    "small values": operator("mixes_small", lambda x: less_the_mean(x, x.abs().amax() < 0.02)),
    "large batches": operator("mixes_large", lambda x: less_the_mean(x, torch.tensor(len(x) > 30))),
    "this batch": operator("mixes_this", lambda x: less_the_mean(x, torch.tensor(len(x) == 24))),
    "pairs": operator("mixes_pairs", lambda x: less_the_mean(x, torch.tensor(len(x) == 2))),
    "equal rows": operator(
        "mixes_equal", lambda x: x / (1 + (x[0] == x[-1]).all() * (len(x) > 1) * len(x))
    ),
    "zeros": operator("mixes_zeros", lambda x: x + (x == 0).all() * len(x)),
    "ordered rows": operator(
        "mixes_ordered", lambda x: less_the_mean(x, (x[1:] >= x[:-1]).float().mean() > 0.8)
    ),
}


def job_of(operation):
    loss = lambda model, batch: (model(operation(batch[0])) - batch[1]).square().mean()  # noqa: E731
    return job_with(loss, batch_size=24)


def found_in(operation):
    return separation_of(job_of(operation)).of(8)


def test_a_proof_names_the_operators_that_were_only_tried():
    found = found_in(APART)
    assert found.is_proved
    assert found.tried == ("apart",)
    assert found_in(torch.tanh).tried == ()


@pytest.mark.slow
@pytest.mark.parametrize("what", MIXING)
def test_operators_that_mix_samples_now_and_then_are_found_out(what):
    assert not found_in(MIXING[what]).is_proved


@pytest.mark.slow
def test_a_plan_says_which_operators_were_only_tried():
    job = job_of(APART)
    found = memfit.plan(job, budget="1GiB", require=["micro-batching"])
    assert found.reasons[0].endswith(
        "proved from the recorded step (but for apart, of which it is not proved, only tried on "
        "examples, that samples stay apart)."
    )


_GENERATORS = {"Python's": random.Random(7).random, "numpy's": np.random.default_rng(7).random}


@pytest.mark.parametrize("whose", _GENERATORS)
def test_a_batch_whose_pieces_took_one_way_by_chance_shows_nothing(whose):
    chance = _GENERATORS[whose]

    def loss(model, batch):
        share = chance()  # so that every piece is likely to go the same way
        outputs = model(batch[0])
        return (outputs if share < 0.999 else 2 * outputs).square().mean()

    with pytest.raises(StrategyError, match=r"could not be proved.*random draws that cannot be"):
        memfit.plan(job_with(loss, batch_size=24), budget="1GiB", require=["micro-batching"])


@pytest.mark.parametrize("whose", _GENERATORS)
def test_rows_of_a_layer_that_draws_outside_torch_are_not_proved_apart(whose):
    class Skipped(torch.nn.Linear):
        def forward(self, x):
            return x + super().forward(x) if _GENERATORS[whose]() < 0.999 else x

    loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    job = job_with(loss, model=lambda: torch.nn.Sequential(Skipped(6, 6), torch.nn.Linear(6, 6)))
    layout = find_layout(job)
    assert not rows_are_apart(job, layout, "0").is_proved
    assert rows_are_apart(job, layout, "1").is_proved
