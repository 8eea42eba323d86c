"""The optimizer in backward does what it does after backward, for optimizers, hooks and states."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from tests.conformance.builders import near_peak
from tests.strategies.optimizer_jobs import (
    OPTIMIZERS,
    Foreign,
    assert_same,
    hooked_before,
    tied_job,
    trained,
    with_own_step,
)
from tests.zoo.small_jobs import facts_of, mean_square_job
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Job, Plan
from memfit.errors import StrategyError
from memfit.forward_state import holders
from memfit.runtime.run import open_plain_session, unguarded_run
from memfit.session.batches import find_layout
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_in_backward import OptimizerInBackward

IN_BACKWARD = Plan(strategies=(OptimizerInBackward(),))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_does_the_same_over_several_steps(name):
    job = tied_job(OPTIMIZERS[name])
    assert_same(trained(job, Plan()), trained(job, IN_BACKWARD))


def test_a_weight_used_twice_is_updated_once_with_its_whole_gradient():
    """Adam counts the updates that it made of each parameter."""
    run = trained(tied_job(), IN_BACKWARD, num_steps=3)
    state = run.optimizer.state[run.model.table.weight]
    assert float(state["step"]) == 3.0


def test_parameter_groups_keep_their_own_settings():
    def groups(parameters):
        return torch.optim.SGD(
            [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "momentum": 0.9}],
            lr=0.01,
        )

    assert_same(trained(tied_job(groups), Plan()), trained(tied_job(groups), IN_BACKWARD))


def test_schedulers_and_hooks_see_one_step_of_the_optimizer_per_step():
    rates, calls = [], []
    for plan in (Plan(), IN_BACKWARD):
        job = tied_job()
        run = trained(job, plan, num_steps=0)
        run.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        scheduler = StepLR(run.optimizer, step_size=2, gamma=0.1)
        for _ in range(4):
            run.step(job.batch(job.batch_size))
            scheduler.step()  # warns, which is an error here, where no step came before
            rates.append(run.optimizer.param_groups[0]["lr"])
    assert len(calls) == 8
    assert rates[:4] == rates[4:]


def test_a_checkpoint_goes_on_with_and_without_the_strategy():
    job = tied_job()
    saved = trained(job, IN_BACKWARD, num_steps=2).state_dict()
    goals = trained(job, Plan(), num_steps=3)
    for plan in (Plan(), IN_BACKWARD):
        run = memfit.start(job, plan)
        run.load_state_dict(copy.deepcopy(saved))
        run.step(job.batch(job.batch_size))
        assert_same(goals, run)


def test_what_begins_to_train_later_is_trained(regression_job):
    runs = []
    for plan in (Plan(), IN_BACKWARD):
        torch.manual_seed(0)
        run = memfit.start(regression_job, plan)
        run.model[0].weight.requires_grad_(False)
        batch = regression_job.batch(10)
        run.step(batch)
        run.model[0].weight.requires_grad_(True)
        run.step(batch)
        runs.append(run)
    assert_same(*runs)


@pytest.mark.slow
def test_gradients_of_all_parameters_never_live_at_once():
    width, num_layers = 128, 8
    job = mean_square_job(
        lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers))),
        width,
        batch_size=2,
        optimizer=lambda parameters: torch.optim.Adam(parameters, fused=True),
    )
    plain, planned = memfit.predict(job), memfit.predict(job, plan=IN_BACKWARD)
    layer_bytes = (width + 1) * width * 4
    assert plain.by_category["gradients"] == num_layers * layer_bytes
    saved_bytes = plain.peak_allocated_bytes - planned.peak_allocated_bytes
    assert saved_bytes > (num_layers - 2) * layer_bytes
    measured = memfit.measure(job, IN_BACKWARD)
    assert planned.peak_allocated_bytes == near_peak(measured.peak_allocated_bytes)


@pytest.mark.slow
def test_a_virtual_gpu_shows_the_saving_too(regression_job):
    job = replace(
        regression_job, model=lambda: nn.Sequential(nn.Linear(16, 2048), nn.Linear(2048, 4))
    )
    plain = memfit.predict(job, "a100-40gb")
    planned = memfit.predict(job, "a100-40gb", IN_BACKWARD)
    assert planned.peak_allocated_bytes < plain.peak_allocated_bytes


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_leaves_no_hooks_and_whole_groups_behind(regression_job, fails):
    def loss(model, batch):
        value = regression_job.loss(model, batch)
        if fails:
            model[0].weight.register_hook(lambda _: 1 / 0)
        return value

    run = memfit.start(replace(regression_job, loss=loss), IN_BACKWARD)
    groups, members = run.optimizer.param_groups, list(run.optimizer.param_groups[0]["params"])
    if fails:
        with pytest.raises(ZeroDivisionError):
            run.step(regression_job.batch(10))
    else:
        run.step(regression_job.batch(10))
    assert run.optimizer.param_groups is groups
    assert [id(member) for member in groups[0]["params"]] == [id(member) for member in members]
    for parameter in run.model.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert parameter.grad is None


def test_a_failing_optimizer_gets_its_groups_back(regression_job):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError

    Failing.__module__ = "torch.optim.failing"
    run = memfit.start(replace(regression_job, optimizer=partial(Failing, lr=0.1)), IN_BACKWARD)
    with pytest.raises(ArithmeticError):
        run.step(regression_job.batch(10))
    assert len(run.optimizer.param_groups[0]["params"]) == 4


class SharedReentrant(nn.Module):
    """Two blocks, recomputed by nested backward passes, share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)

    def forward(self, inputs):
        hidden = inputs.requires_grad_()
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        return hidden


def test_a_gradient_that_comes_in_parts_is_refused(regression_job):
    job = replace(
        regression_job,
        model=SharedReentrant,
        loss=lambda model, batch: model(batch[0].clone()).square().mean(),
    )
    with pytest.raises(StrategyError, match="use_reentrant=False"):
        trained(job, IN_BACKWARD, num_steps=1)


def test_a_weight_that_backward_still_reads_is_not_changed_silently(regression_job):
    """The first layer's gradient goes through the second one's weight, which is detached there."""

    def loss(model, batch):
        first, _, second = model
        hidden = first(batch[0]) @ second.weight.t().detach()
        return (hidden + second(batch[0].new_ones(1, 32))).square().mean()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(replace(regression_job, loss=loss), IN_BACKWARD, num_steps=1)


def hooked_after(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def scheduled(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    StepLR(optimizer, 1)
    return optimizer


def obstacle(job: Job) -> str | None:
    return OptimizerInBackward().obstacle(facts_of(job))


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (torch.optim.LBFGS, "LBFGS may need the gradients of all parameters at once"),
        (partial(Foreign, lr=0.1), "Foreign may need"),
        (hooked_before, "has a hook before its step"),
        (with_own_step, "has a step function of its own"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(regression_job, optimizer, reason):
    assert reason in obstacle(replace(regression_job, optimizer=optimizer))


@pytest.mark.parametrize("optimizer", [hooked_after, scheduled])
def test_what_only_counts_steps_is_not_refused(regression_job, optimizer):
    job = replace(regression_job, optimizer=optimizer)
    assert obstacle(job) is None
    assert_same(trained(job, Plan()), trained(job, IN_BACKWARD))


def test_micro_batches_are_refused(regression_job):
    plan = Plan(strategies=(OptimizerInBackward(), MicroBatching(micro_batch_size=5)))
    with pytest.raises(StrategyError, match="needs the gradients of all pieces"):
        memfit.start(regression_job, plan)


@dataclass(frozen=True, kw_only=True)
class Halved(OptimizerInBackward):
    """Plant a fault: go backward from half of the loss."""

    def apply(self, session):
        undo = super().apply(session)
        session.backward = lambda loss: (loss / 2).backward()
        return undo


def test_verification_compares_gradients_that_are_gone_when_the_step_ends(regression_job):
    kept = memfit.verify(regression_job, IN_BACKWARD)
    assert kept.worst_gradient
    assert kept.largest_error <= 1e-10
    found = memfit.verify(regression_job, Plan(strategies=(Halved(),)))
    assert found.gradient_error == pytest.approx(0.5)


class Own(nn.Linear):
    """A layer that is not one of torch's, which are known to hold nothing else."""


@pytest.mark.parametrize("strategies", [(), (OptimizerInBackward(),)], ids=["alone", "together"])
def test_blocks_that_run_again_are_looked_through_once(monkeypatch, strategies):
    """After another plan, whose hooks have come and gone: once this took most of a small step."""
    job = mean_square_job(lambda: nn.Sequential(*(Own(8, 8) for _ in range(3))), 8)
    session = open_plain_session(job, "cpu", find_layout(job))
    batch = job.batch(job.batch_size)
    with closing(unguarded_run(session, IN_BACKWARD)) as run:
        run.step(batch)
    looked = []
    looked_beyond = holders.walk_beyond
    monkeypatch.setattr(
        holders, "walk_beyond", lambda *args: looked.append(1) or looked_beyond(*args)
    )
    plan = Plan(strategies=(*strategies, ActivationCheckpointing(blocks=("0", "1"))))
    with closing(unguarded_run(session, plan)) as run:
        for _ in range(3):
            run.step(batch)
    assert not looked
