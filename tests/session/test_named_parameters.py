"""An optimizer function that asks for named parameters gets them, wherever an optimizer is made."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Plan
from memfit.errors import JobError
from memfit.session.optimizer_facts import options_in_use
from memfit.strategies import (
    EightBitOptimizer,
    OptimizerImplementation,
    OptimizerInBackward,
    OptimizerOffload,
)
from memfit.verification.verify import verify

WIDTH = 72  # more than the 4096 values below which the 8-bit optimizer keeps fp32


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def groups_of(decayed, others):
    return [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]


def by_shape(parameters, kind=torch.optim.AdamW):
    parameters = list(parameters)
    decayed = [each for each in parameters if each.dim() > 1]
    return kind(groups_of(decayed, [each for each in parameters if each.dim() < 2]), lr=0.05)


def by_name(named_parameters, kind=torch.optim.AdamW):
    named = dict(named_parameters)
    decayed = [name for name in named if name in {"0.weight", "2.weight"}]
    others = [name for name in named if name not in decayed]
    return kind(groups_of([named[n] for n in decayed], [named[n] for n in others]), lr=0.05)


def by_name_handed_on(named_parameters, kind=torch.optim.AdamW):
    """Give torch the pairs themselves, which it takes since 2.6."""
    named = list(named_parameters)
    decayed = [pair for pair in named if pair[0] in {"0.weight", "2.weight"}]
    others = [pair for pair in named if pair not in decayed]
    return kind(groups_of(decayed, others), lr=0.05)


class Maker:
    """A callable object."""

    def __call__(self, named_parameters):
        return by_name(named_parameters)

    def make(self, named_parameters, lr=0.1):
        return by_name_handed_on(named_parameters)


JOB = mean_square_job(model, WIDTH, optimizer=by_shape)
FUNCTIONS = {
    "pairs taken apart": by_name,
    "pairs handed on": by_name_handed_on,
    "partial": partial(by_name, kind=torch.optim.AdamW),
    "object": Maker(),
    "method": Maker().make,
}
PLANS = {
    "plain": Plan(),
    "fused": Plan(strategies=(OptimizerImplementation(implementation="fused"),)),
    "in backward": Plan(strategies=(OptimizerInBackward(),)),
    "offload": Plan(strategies=(OptimizerOffload(to="disk"),)),
    "8 bit": Plan(strategies=(EightBitOptimizer(),)),
}


def trained(job, plan) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with memfit.start(job, plan) as run:
        for _ in range(3):
            run.step(job.batch(4))
        return [each.detach().clone() for each in run.model.parameters()]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_groups_by_name_train_as_the_same_groups_by_shape(function, plan):
    expected = trained(JOB, plan)
    found = trained(replace(JOB, optimizer=function), plan)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_they_are_predicted_measured_and_verified_alike(plan):
    named = replace(JOB, optimizer=by_name_handed_on)
    assert (
        memfit.predict(named, plan=plan).by_category == memfit.predict(JOB, plan=plan).by_category
    )
    assert verify(named, plan) == verify(JOB, plan)
    measured = [memfit.measure(each, plan).peak_allocated_bytes for each in (named, JOB)]
    assert measured[0] == measured[1]


@pytest.mark.slow
def test_a_card_of_the_catalogue_and_a_plan_get_the_names_too():
    named = replace(JOB, optimizer=by_name)
    assert memfit.predict(named, "t4").by_category == memfit.predict(JOB, "t4").by_category
    assert memfit.plan(named, budget="1GiB").labels() == memfit.plan(JOB, budget="1GiB").labels()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_names_stay_with_the_groups(plan):
    with memfit.start(replace(JOB, optimizer=by_name_handed_on), plan) as run:
        run.step(JOB.batch(4))
        names = [group["param_names"] for group in run.optimizer.param_groups]
        assert "param_names" not in options_in_use(run.optimizer), "names are no setting"
    assert names == [["0.weight", "2.weight"], ["0.bias", "1.weight", "1.bias", "2.bias"]]


@pytest.mark.slow
def test_a_living_optimizer_over_named_parameters_is_left_as_it_was():
    living = model()
    job = replace(JOB, model=lambda: living, optimizer=by_name)
    before = [each.detach().clone() for each in living.parameters()]
    assert memfit.predict(job).by_category == memfit.predict(JOB).by_category
    memfit.measure(job)
    assert all(torch.equal(a, b) for a, b in zip(before, living.parameters(), strict=True))


def test_the_name_of_the_argument_decides_and_the_error_says_so():
    seen = []

    def make(parameters):
        seen.extend(parameters)
        return torch.optim.SGD(seen, lr=0.1)

    with memfit.start(replace(JOB, optimizer=make)):
        assert all(isinstance(each, nn.Parameter) for each in seen)
    with pytest.raises(JobError, match=r"\(parameters\) or \(named_parameters\) -> "):
        replace(JOB, optimizer=lambda: None)
