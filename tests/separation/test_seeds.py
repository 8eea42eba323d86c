"""Draws that begin where the step has set a generator are the same in each piece."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.separation.linear_jobs import found_in, job_with, separation_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Plan
from memfit.errors import JobError
from memfit.losses import cached_embeddings
from memfit.strategies.activation_checkpointing import ActivationCheckpointing

KEPT = torch.Generator()
SEEDED = torch.Generator()
STATE = torch.get_rng_state()


def seeded(x):
    torch.manual_seed(0)
    return torch.randn_like(x)


def seeded_afterwards(x):
    noise = torch.randn_like(x)
    torch.manual_seed(0)
    return noise


def by_a_generator_of_ones_own(x):
    SEEDED.manual_seed(1)
    return torch.randn(x.shape, generator=SEEDED)


def by_default_generator(x):
    torch.default_generator.manual_seed(0)
    return torch.rand_like(x)


def from_a_kept_state(x):
    torch.set_rng_state(STATE)
    return torch.randn_like(x)


def forked(x):
    with torch.random.fork_rng():
        return torch.randn_like(x)


def put_back(x):
    state = torch.get_rng_state()
    noise = torch.randn_like(x)
    torch.set_rng_state(state)
    return noise


def seeded_on_gpus(x):
    torch.cuda.manual_seed_all(0)
    return torch.randn_like(x)


def seeded_dropout(x):
    torch.manual_seed(0)
    return F.dropout(x, 0.5)


def by_numpy(x):
    np.random.seed(0)
    return torch.from_numpy(np.random.randn(*x.shape)).float()


def by_python(x):
    random.seed(0)
    return torch.tensor([[random.random()] for _ in x])


def in_a_loop(x):
    torch.manual_seed(0)
    return torch.stack([torch.randn_like(row) for row in x])


SET = {
    "seed": seeded,
    "seed afterwards": seeded_afterwards,
    "generator": by_a_generator_of_ones_own,
    "new generator": lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
    "new generator without a seed": lambda x: torch.randn(x.shape, generator=torch.Generator()),
    "cloned generator": lambda x: torch.randn(x.shape, generator=SEEDED.clone_state()),
    "default generator": by_default_generator,
    "state": from_a_kept_state,
    "fork": forked,
    "state put back": put_back,
    "gpus": seeded_on_gpus,
    "dropout": seeded_dropout,
}
OUTSIDE = {"numpy": by_numpy, "python": by_python, "loop": in_a_loop}


def dropped(x):
    return F.dropout(x, 0.5)


GOING_ON = {
    "plain": torch.randn_like,
    "kept generator": lambda x: torch.randn(x.shape, generator=KEPT),
    "twice": lambda x: torch.randn_like(x) + dropped(torch.rand_like(x)),
    "checkpoint": lambda x: checkpoint(dropped, x.clone().requires_grad_(), use_reentrant=False),
    "reentrant": lambda x: checkpoint(dropped, x.clone().requires_grad_(), use_reentrant=True),
}


def noisy_job(noise):
    def loss(model, batch):
        return (model(batch[0] + noise(batch[0])) - batch[1]).square().mean()

    return job_with(loss)


@pytest.mark.parametrize("name", SET)
def test_draws_from_a_state_that_the_step_sets_are_refused(name):
    found = found_in(noisy_job(SET[name]))
    assert found.is_refuted
    assert "each piece would draw the same" in found.sentence
    assert "test_seeds.py:" in found.culprit.source_line


@pytest.mark.parametrize("name", OUTSIDE)
def test_seeded_draws_that_are_no_operators_are_not_proved(name):
    assert not found_in(noisy_job(OUTSIDE[name])).is_proved


@pytest.mark.parametrize("name", GOING_ON)
def test_draws_that_go_on_are_proved_and_generators_left_alone(name):
    before = torch.get_rng_state(), KEPT.get_state()
    found = found_in(noisy_job(GOING_ON[name]))
    assert found.is_proved
    assert found.draws
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], KEPT.get_state())


def test_a_seed_before_a_step_that_draws_nothing_is_no_matter():
    def loss(model, batch):
        torch.manual_seed(0)
        return (model(batch[0]) - batch[1]).square().mean()

    found = found_in(job_with(loss))
    assert found.is_proved
    assert not found.draws


class Noisy(nn.Module):
    """Adds noise from a generator of its own, or from a seed."""

    def __init__(self, seeds: bool):
        super().__init__()
        self.linear, self.seeds = nn.Linear(6, 6), seeds
        self.generator = torch.Generator()

    def forward(self, x):
        if self.seeds:
            self.generator.manual_seed(0)
        return self.linear(x) + torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


@pytest.mark.parametrize("seeds", [True, False])
def test_representations_and_embeddings_are_asked_as_well(seeds):
    job = job_with(
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        model=lambda: Noisy(seeds),
    )
    assert separation_of(job).of_rows("").is_proved is not seeds
    if not seeds:
        cached_embeddings(Noisy(seeds), torch.randn(8, 6), chunk=3)
        return
    with pytest.raises(JobError, match="would draw the same"):
        cached_embeddings(Noisy(seeds), torch.randn(8, 6), chunk=3)


def test_a_seeded_block_is_computed_again_as_it_was():
    job = job_with(
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        model=lambda: nn.Sequential(Noisy(seeds=True), Noisy(seeds=True)),
    )
    plan = Plan(strategies=(ActivationCheckpointing(blocks=("0", "1")),))
    assert memfit.verify(job, plan).earned == "exact"
