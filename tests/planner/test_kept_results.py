"""What is kept inside recomputed blocks leaves the results alone where draws and casts happen."""

from __future__ import annotations

import pytest
import torch
from tests.zoo import planned_jobs as planner_jobs
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.bf16 import Bf16
from memfit.verification.verify import Verifier


class Noisy(nn.Module):
    """A block that draws twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        hidden = torch.tanh(self.first(x) * torch.rand_like(x))
        return x + torch.tanh(self.second(hidden) * torch.rand_like(hidden))


def noisy() -> Job:
    def build() -> nn.Module:
        return nn.Sequential(*(Noisy(256) for _ in range(3)))

    return mean_square_job(build, 256, batch_size=2048)


def refinements_of(job: Job, device: str = "cpu"):
    return planner_jobs.evaluator_of(job, device).in_full(()).refinements


def kept_by(refinement) -> set[str]:
    return {
        call.partition(".")[0]
        for strategy in refinement.strategies
        if isinstance(strategy, ActivationCheckpointing)
        for call in strategy.keep
    }


@pytest.mark.slow
def test_every_refinement_of_a_job_that_draws_keeps_its_results():
    refinements = refinements_of(noisy())
    trial = Verifier(noisy())
    assert len(refinements) > 3
    for refinement in refinements:
        assert trial.verify(Plan(strategies=refinement.strategies)).largest_error <= 1e-10


@pytest.mark.slow
def test_what_draws_random_numbers_is_never_kept():
    blocks = {"device": "a100-40gb"}
    job = planner_jobs.post_norm(width=512, num_blocks=2, tokens=256, batch_size=16)
    kept = set().union(*(kept_by(r) for r in refinements_of(job, **blocks)))
    assert kept
    assert not kept & {"native_dropout", "_scaled_dot_product_efficient_attention"}


def test_attention_that_drops_nothing_may_be_kept():
    job = planner_jobs.transformer(num_blocks=2)
    kept = set().union(*(kept_by(r) for r in refinements_of(job)))
    assert "_scaled_dot_product_flash_attention_for_cpu" in kept


@pytest.mark.slow
@pytest.mark.parametrize("keep", [("rand_like.0",), ("rand_like.1",), ("rand_like.0", "addmm.1")])
def test_a_draw_that_is_named_to_be_kept_is_drawn_again_instead(keep):
    plan = Plan(strategies=(ActivationCheckpointing(blocks=("0-2",), keep=keep),))
    assert memfit.verify(noisy(), plan).largest_error <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("keep", [("addmm.0",), ("_to_copy.0",), ("_to_copy.2", "tanh.0")])
def test_blocks_that_share_a_weight_may_keep_results_under_autocast(keep):
    def model():
        blocks = nn.Sequential(*(planner_jobs.MLP(16) for _ in range(3)))
        for block in blocks[1:]:
            block.up.weight = blocks[0].up.weight
        return blocks

    job = mean_square_job(model, 16, batch_size=16)
    plain = memfit.verify(job, Plan(strategies=(Bf16(),)), dtype=torch.float32)
    kept = Plan(strategies=(ActivationCheckpointing(blocks=("0-2",), keep=keep), Bf16()))
    found = memfit.verify(job, kept, dtype=torch.float32)
    assert found.gradient_error <= 2 * plain.gradient_error
