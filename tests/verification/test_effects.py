"""Verification sees hooks on gradients and whatever a step leaves behind besides its results."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import pytest
import torch
from tests.zoo import living_jobs
from tests.zoo.living_jobs import bits_of, mean_square
from tests.zoo.small_jobs import mean_square_job, session_of
from torch import nn
from torch.nn.utils import parametrizations

import memfit
from memfit import Job, Plan
from memfit.analysis.separability import PROVED
from memfit.comparison.gradients import accumulate_gradients
from memfit.comparison.split_comparison import compare_splits
from memfit.errors import NothingToVerifyError, StrategyError
from memfit.separation.separation import Separation
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.base import Numerics, Strategy
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_implementation import OptimizerImplementation
from memfit.verification import proof

IN_PIECES = Plan(strategies=(MicroBatching(micro_batch_size=3),))


MOMENTUM = partial(torch.optim.SGD, lr=0.5, momentum=0.9)


def job_of(build, loss=mean_square) -> Job:
    return mean_square_job(build, 6, batch_size=8, loss=loss, optimizer=MOMENTUM)


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


@pytest.mark.slow
@pytest.mark.parametrize("build", [clamped, scaled_after])
def test_hooks_that_do_not_add_up_over_pieces_are_seen(build, monkeypatch):
    with pytest.raises(StrategyError, match=r"hook|couples the samples of a batch"):
        memfit.verify(job_of(build), IN_PIECES)
    # As if the proof that pieces keep the results were wrong.
    monkeypatch.setattr(Separation, "of", lambda *_args, **_wanted: PROVED)
    found = memfit.verify(job_of(build), IN_PIECES)
    assert not found.keeps_promise
    assert found.gradient_error > 0.1
    assert found.parameter_error > 1e-3
    living = build()
    kept = memfit.verify(job_of(lambda: living), IN_PIECES)
    assert kept.gradient_error > 0.1


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_backward_leaves_behind_is_left_once_by_pieces():
    class Weighed(nn.Linear):
        def __init__(self):
            super().__init__(6, 2)
            self.num_backwards = 0
            self.weight.register_hook(self.count)

        def count(self, gradient):
            self.num_backwards += 1

    found = memfit.verify(job_of(Weighed), IN_PIECES)
    assert (found.earned, found.effects) == ("exact", ())


@pytest.mark.slow
def test_power_iterations_happen_once_in_however_many_pieces():
    def build():
        first = parametrizations.spectral_norm(nn.Linear(6, 8))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 2))

    found = memfit.verify(job_of(build), IN_PIECES)
    assert (found.earned, found.is_proof, found.effects) == ("exact", True, ())
    assert not memfit.verify(job_of(build), Plan(strategies=(ForwardTwice(),))).keeps_promise


@dataclass(frozen=True, kw_only=True)
class ForwardTwice(Strategy):
    """Claim to be exact, and run another forward before every step."""

    name: ClassVar[str] = "forward-twice"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    scale: float = 1.0
    """What the batch of that forward is multiplied by."""

    @classmethod
    def options(cls, facts):
        yield cls()

    def obstacle(self, facts):
        return None

    def apply(self, session):
        before = session.gradient_pass

        def gradient_pass(session, batch, enter_phase):
            with torch.no_grad():
                session.loss_of(self.scale * batch)
            return before(session, batch, enter_phase)

        session.gradient_pass = gradient_pass
        return lambda: setattr(session, "gradient_pass", before)


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


@pytest.mark.slow
def test_counts_that_differ_are_named_and_break_exact():
    plan = Plan(strategies=(ForwardTwice(),))
    found = memfit.verify(job_of(Counting), plan)
    assert found.earned == "different"
    assert found.effects == ("model.calls: 4 after the plan, 2 after the plain step",)
    assert found.largest_error < 1e-10
    with pytest.raises(memfit.MemfitError, match="claims exact and is different"):
        proof.verify_each(job_of(Counting), plan).check()


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

    plan = Plan(strategies=(ForwardTwice(scale=3.0),))
    found = memfit.verify(job_of(lambda: nn.Linear(6, 2), loss), plan)
    assert found.earned != "exact"
    assert found.effect_error > 1e-3
    assert "best" in found.worst
    assert best.item() == 0.0


def test_a_clock_is_no_effect():
    class Timed(nn.Linear):
        def forward(self, x):
            self.last_seconds = time.perf_counter()
            return super().forward(x)

    def build():
        return nn.Sequential(*(nn.Sequential(Timed(6, 6), nn.Tanh()) for _ in range(3)))

    plan = Plan(strategies=(ActivationCheckpointing(),))
    found = memfit.verify(job_of(build), plan)
    assert (found.earned, found.effects) == ("exact", ())


@pytest.mark.slow
def test_a_generator_that_is_drawn_from_more_often_is_same_in_law_at_best():
    generator = torch.Generator().manual_seed(0)

    def loss(model, batch):
        torch.rand(1, generator=generator)
        return model(batch).square().mean()

    found = memfit.verify(job_of(lambda: nn.Linear(6, 2), loss), IN_PIECES)
    assert found.largest_error < 1e-10
    assert found.earned == "same-in-law"


@pytest.mark.slow
def test_a_trial_in_which_the_plan_does_nothing_is_refused():
    plan = Plan(strategies=(MicroBatching(micro_batch_size=8),))
    with pytest.raises(NothingToVerifyError, match=r"batch_size=17, or with smaller micro-batches"):
        memfit.verify(job_of(Counting), plan)
    with pytest.raises(NothingToVerifyError):
        memfit.verify(job_of(Counting), IN_PIECES, batch_size=3)
    assert memfit.verify(job_of(lambda: nn.Linear(6, 2)), plan, batch_size=9).earned == "exact"


@pytest.mark.slow
def test_what_casts_to_its_own_types_is_compared_in_fp64():
    found = memfit.verify(living_jobs.frozen_backbone().job, IN_PIECES)
    assert (found.dtype, found.earned, found.is_proof) == ("float64", "exact", True)


@pytest.mark.slow
def test_what_runs_only_in_its_own_types_is_no_proof():
    job = living_jobs.frozen_backbone().job

    def loss(model, batch):
        assert model["backbone"].weight.dtype is torch.bfloat16
        return job.loss(model, batch)

    found = memfit.verify(replace(job, loss=loss), IN_PIECES)
    assert (found.dtype, found.earned, found.is_proof) == ("own", "unproved", False)
    assert "compared in the job's own types" in found.notes[0]


def test_a_living_model_is_verified_with_the_state_that_it_has():
    living = living_jobs.hooked()
    step = int(next(iter(living.optimizer.state.values()))["step"])
    found = memfit.verify(living.job, Plan())
    assert (found.earned, found.is_proof) == ("exact", True)
    assert int(next(iter(living.optimizer.state.values()))["step"]) == step


# --- Gradients of one batch in pieces of several sizes ---


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
        living_jobs.recurrent,
        living_jobs.quantised,
        living_jobs.noted,
    ],
    ids=lambda build: build.__name__,
)
def test_splits_that_see_each_other_are_refused_and_leave_nothing(build, dtype):
    living = build()
    session, batch = session_of(living.job), living.job.batch(8)
    before = bits_of(living)
    with pytest.raises(StrategyError, match=r"each piece leaves .* in another state"):
        compare_splits(session, batch, [8, 4], dtype=dtype)
    assert bits_of(living) == before


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize(
    "build", [living_jobs.spectral, living_jobs.taught], ids=lambda build: build.__name__
)
def test_splits_that_leave_what_no_sample_has_a_part_in_agree(build, dtype):
    living = build()
    session, batch = session_of(living.job), living.job.batch(8)
    before = bits_of(living)
    found = compare_splits(session, batch, [8, 4], dtype=dtype)
    assert bits_of(living) == before
    assert (found.agrees, found.effects) == (True, ())


def test_what_splits_leave_otherwise_is_named():
    job = job_of(Counting)
    session = session_of(job)

    def gradient_pass(session, batch, enter_phase):
        for piece, _ in session.layout.split(batch, session.micro_batch_size):
            session.loss_of(piece)
        return accumulate_gradients(session, batch, enter_phase)

    session.model.peak.fill_(100.0)
    found = compare_splits(session, job.batch(8), [8, 4], gradient_pass=gradient_pass)
    assert not found.agrees
    assert found.effects == ("model.calls: 3 in pieces, 2 in one piece",)


def test_a_coupled_loss_is_named_with_its_worst_parameter():
    job = job_of(lambda: nn.Linear(6, 2), lambda model, batch: model(batch).var(dim=0).sum())
    session = session_of(job)
    found = compare_splits(session, job.batch(8), [8, 4], dtype=torch.float64)
    assert found.largest_error > 0.01
    assert found.worst_parameter in ("weight", "bias", "the loss")
    assert (found.worst_size, found.effects) == (4, ())


def test_draws_are_deterministic_when_splits_are_compared():
    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    job = job_of(build)
    found = compare_splits(session_of(job), job.batch(8), [8, 3])
    assert found.agrees
    assert found.num_draws > 0
    assert found.still_random == ()


def test_one_size_compares_nothing():
    job = job_of(lambda: nn.Linear(6, 2))
    with pytest.raises(ValueError, match="At least two different sizes"):
        compare_splits(session_of(job), job.batch(8), [8, 8])
