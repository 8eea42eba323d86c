"""Verification sees hooks on gradients and whatever a step leaves behind besides its results."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from tests.unit import living_jobs
from tests.unit.living_jobs import bits_of, mean_square, rows
from torch import nn
from torch.nn.utils import parametrizations

import memfit
from memfit import Job, Plan, proof
from memfit.errors import NothingToVerifyError
from memfit.runtime.run import open_plain_session
from memfit.runtime.split_comparison import compare_splits
from memfit.session.batches import find_layout
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation

IN_PIECES = Plan(strategies=(MicroBatching(micro_batch_size=3),))


def job_of(build, loss=mean_square, batch=None, batch_size=8) -> Job:
    return Job(
        model=build,
        batch=batch or rows(6),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        batch_size=batch_size,
    )


def clamped() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return model


def scaled_after() -> nn.Module:
    def normalise(parameter):
        parameter.grad.div_(parameter.grad.norm())

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(normalise)
    return model


@pytest.mark.parametrize("build", [clamped, scaled_after])
def test_hooks_that_do_not_add_up_over_pieces_are_seen(build):
    found = memfit.verify(job_of(build), IN_PIECES)
    assert not found.keeps_promise
    assert found.gradient_error > 0.1
    assert found.parameter_error > 1e-3
    living = build()
    kept = memfit.verify(job_of(lambda: living), IN_PIECES)
    assert kept.gradient_error > 0.1


def test_a_hook_that_adds_up_is_carried_out_in_fp64_and_is_exact():
    seen: set[torch.dtype] = set()

    def build():
        model = nn.Linear(6, 2)

        def double(gradient):
            seen.add(gradient.dtype)
            return gradient * 2

        model.weight.register_hook(double)
        return model

    found = memfit.verify(job_of(build), IN_PIECES)
    assert (found.earned, found.dtype, found.is_proof) == ("exact", "float64", True)
    assert seen == set()  # what the hook noted was put back as well


def test_power_iterations_in_every_piece_are_seen():
    def build():
        first = parametrizations.spectral_norm(nn.Linear(6, 8))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 2))

    found = memfit.verify(job_of(build), IN_PIECES)
    assert not found.keeps_promise
    assert found.buffer_error > 1e-6


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.calls = 0
        self.peak = torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.peak = torch.maximum(self.peak, x.detach().abs().max())
        return self.blocks(x)


def test_counts_that_differ_are_named_and_break_exact():
    found = memfit.verify(job_of(Counting), IN_PIECES)
    assert found.earned == "different"
    assert found.effects == ("model.calls: 6 after the plan, 2 after the plain step",)
    assert found.largest_error < 1e-10
    with pytest.raises(memfit.MemfitError, match="claims exact and is different"):
        proof.prove(job_of(Counting), IN_PIECES).check()


def test_what_a_plan_keeps_is_exact_with_effects_and_all():
    plan = Plan(
        strategies=(ActivationCheckpointing(), OptimizerImplementation(implementation="loop"))
    )
    found = memfit.verify(job_of(Counting), plan)
    assert (found.earned, found.effects) == ("exact", ())


def test_a_tensor_that_the_loss_holds_on_to_is_compared():
    best = torch.zeros(())

    def loss(model, batch):
        value = model(batch).square().mean()
        best.copy_(torch.maximum(best, value.detach()))
        return value

    found = memfit.verify(job_of(lambda: nn.Linear(6, 2), loss), IN_PIECES)
    assert found.earned != "exact"
    assert found.effect_error > 1e-3
    assert "best" in found.worst
    assert best.item() == 0.0


def test_a_clock_is_no_effect():
    class Timed(nn.Linear):
        def forward(self, x):
            self.last_seconds = time.perf_counter()
            return super().forward(x)

    assert memfit.verify(job_of(lambda: Timed(6, 2)), IN_PIECES).earned == "exact"


def test_a_generator_that_is_drawn_from_more_often_is_same_in_law_at_best():
    generator = torch.Generator().manual_seed(0)

    def loss(model, batch):
        torch.rand(1, generator=generator)
        return model(batch).square().mean()

    found = memfit.verify(job_of(lambda: nn.Linear(6, 2), loss), IN_PIECES)
    assert found.largest_error < 1e-10
    assert found.earned == "same-in-law"


def test_a_trial_in_which_the_plan_does_nothing_is_refused():
    plan = Plan(strategies=(MicroBatching(micro_batch_size=8),))
    with pytest.raises(NothingToVerifyError, match=r"batch_size=17, or with smaller micro-batches"):
        memfit.verify(job_of(Counting), plan)
    with pytest.raises(NothingToVerifyError):
        memfit.verify(job_of(Counting), IN_PIECES, batch_size=3)
    assert memfit.verify(job_of(lambda: nn.Linear(6, 2)), plan, batch_size=9).earned == "exact"


def test_what_runs_only_in_its_own_types_is_no_proof():
    living = living_jobs.frozen_backbone()
    found = memfit.verify(living.job, IN_PIECES)
    assert (found.dtype, found.earned, found.is_proof) == ("own", "unproved", False)
    assert "compared in the job's own types" in found.notes[0]


def test_a_living_model_is_verified_with_the_state_that_it_has():
    living = living_jobs.hooked()
    step = int(next(iter(living.optimizer.state.values()))["step"])
    found = memfit.verify(living.job, Plan())
    assert (found.earned, found.is_proof) == ("exact", True)
    assert int(next(iter(living.optimizer.state.values()))["step"]) == step


# --- Gradients of one batch in pieces of several sizes ---


def session_of(job: Job):
    return open_plain_session(job, "cpu", find_layout(job))


@pytest.mark.parametrize(("dtype", "bound"), [(None, 1e-4), (torch.float64, 1e-10)])
def test_splits_of_a_mean_agree_in_any_precision(dtype, bound):
    living = living_jobs.perceptron()
    session, batch = session_of(living.job), living.job.batch(8)
    before = bits_of(living)
    found = compare_splits(session, batch, [8, 3, 1], dtype=dtype)
    assert bits_of(living) == before
    assert found.agrees
    assert (found.bound, found.sizes) == (bound, (8, 3, 1))


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize(
    "build",
    [
        living_jobs.convolutional,
        living_jobs.spectral,
        living_jobs.recurrent,
        living_jobs.taught,
        living_jobs.quantised,
        living_jobs.noted,
    ],
    ids=lambda build: build.__name__,
)
def test_splits_that_see_each_other_do_not_agree_and_leave_nothing(build, dtype):
    living = build()
    session, batch = session_of(living.job), living.job.batch(8)
    before = bits_of(living)
    found = compare_splits(session, batch, [8, 4], dtype=dtype)
    assert bits_of(living) == before
    assert not found.agrees
    assert found.effects


def test_a_coupled_loss_is_named_with_its_worst_parameter():
    job = job_of(lambda: nn.Linear(6, 2), lambda model, batch: model(batch).var(dim=0).sum())
    session = session_of(job)
    found = compare_splits(session, job.batch(8), [8, 4], dtype=torch.float64)
    assert found.largest_error > 0.01
    assert found.worst_parameter in ("weight", "bias", "the loss")
    assert (found.worst_size, found.effects) == (4, ())


def test_draws_are_stilled_when_splits_are_compared():
    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    job = job_of(build)
    found = compare_splits(session_of(job), job.batch(8), [8, 3])
    assert found.agrees
    assert found.num_draws > 0
    assert found.unstilled == ()


def test_one_size_compares_nothing():
    job = replace(job_of(lambda: nn.Linear(6, 2)))
    with pytest.raises(ValueError, match="At least two different sizes"):
        compare_splits(session_of(job), job.batch(8), [8, 8])
