"""Promises that strategies make for particular models."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import memfit
from memfit import Plan
from memfit.errors import NotSeparableError, StrategyError
from memfit.runtime.run import open_plain_session
from memfit.session.batches import find_layout
from memfit.strategies import build_strategy
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.loss_chunking import LossChunking
from memfit.strategies.micro_batching import MicroBatching

from . import builders

EXACT = 1e-10


def plan_of(*strategies) -> Plan:
    return Plan(strategies=strategies)


def open_session(job, seed: int = 0):
    torch.manual_seed(seed)
    return open_plain_session(job, "cpu", find_layout(job))


@pytest.mark.parametrize(
    ("job", "strategies"),
    [
        (
            builders.ragged_tokens,
            [
                ("optimizer-implementation", {"implementation": "loop"}),
                ("activation-checkpointing", {}),
                ("micro-batching", {"micro_batch_size": 2}),
            ],
        ),
        (
            builders.many_candidates,
            [
                ("optimizer-implementation", {"implementation": "fused"}),
                ("loss-chunking", {"num_candidates": 130}),
                ("micro-batching", {"micro_batch_size": 4}),
            ],
        ),
        (
            builders.batch_normalised,
            [
                ("optimizer-implementation", {"implementation": "fused"}),
                ("batchnorm-replay", {"micro_batch_size": 4}),
            ],
        ),
    ],
    ids=["ragged", "candidates", "batch-norm"],
)
def test_strategies_together_are_as_exact_as_alone(job, strategies):
    plan = plan_of(*(build_strategy(name, settings) for name, settings in strategies))
    assert memfit.verify(job(), plan).largest_error <= EXACT


@pytest.mark.parametrize(
    "setting",
    [
        ActivationCheckpointing(),
        ActivationCheckpointing(blocks=("1-2",)),
        ActivationCheckpointing(keep=("native_dropout.0", "addmm.0")),
        ActivationCheckpointing(blocks=("0.up", "2"), keep=("gelu.0",)),
    ],
    ids=lambda setting: setting.label(),
)
def test_checkpointing_draws_the_same_dropout_masks(setting):
    plan = plan_of(setting)
    job = builders.residual_with_dropout()
    found = memfit.verify(job, plan, dtype=torch.float32)
    assert found.numerics == "exact"
    assert found.largest_error == 0.0
    assert memfit.verify(job, plan, dtype=torch.float32, seed=1).largest_error == 0.0


@pytest.mark.parametrize("keep", [(), ("native_batch_norm.0",), ("convolution.0", "tanh.0")])
def test_checkpointing_updates_running_statistics_once(keep):
    job = builders.batch_normalised()
    assert memfit.verify(job, plan_of(ActivationCheckpointing(keep=keep))).largest_error <= EXACT
    run = memfit.start(job, plan_of(ActivationCheckpointing(keep=keep)))
    run.step(job.batch(job.batch_size))
    counts = [value for name, value in run.model.named_buffers() if "num_batches" in name]
    assert [int(count) for count in counts] == [1] * 4


def test_a_block_that_two_strategies_name_is_refused():
    settings = ActivationCheckpointing(blocks=("0-1",)), ActivationCheckpointing(blocks=("1",))
    with pytest.raises(StrategyError, match="1 is named twice"):
        memfit.start(builders.residual(), plan_of(*settings))


def test_blocks_may_be_treated_differently():
    job = builders.residual()
    plan = plan_of(
        ActivationCheckpointing(blocks=("0-1",)),
        ActivationCheckpointing(blocks=("3",), keep=("addmm.0",)),
    )
    assert memfit.verify(job, plan).largest_error <= EXACT


def test_what_is_kept_is_not_computed_again():
    job = builders.large_residual()
    whole = memfit.predict(job, plan=plan_of(ActivationCheckpointing()))
    kept = memfit.predict(job, plan=plan_of(ActivationCheckpointing(keep=("addmm.0",))))
    assert whole.num_flops > kept.num_flops == memfit.predict(job).num_flops


def test_replay_updates_running_statistics_as_one_step_on_the_whole_batch_does():
    job = builders.batch_normalised()
    found = memfit.verify(job, plan_of(BatchNormReplay(micro_batch_size=3)))
    assert found.buffer_error <= EXACT
    run = memfit.start(job, plan_of(BatchNormReplay(micro_batch_size=3)))
    for _ in range(3):
        run.step(job.batch(job.batch_size))
    counts = [value for name, value in run.model.named_buffers() if "num_batches" in name]
    assert [int(count) for count in counts] == [3] * 4


def test_replay_draws_the_same_dropout_masks_in_all_of_its_passes():
    """With fixed masks the gradient says how the loss changes along itself; else it does not."""
    job = builders.batch_normalised(rate=0.4)
    session = open_session(job)
    session.model.double()
    batch = tuple(part.double() for part in job.batch(job.batch_size))
    BatchNormReplay(micro_batch_size=3).apply(session)
    parameters = list(session.model.parameters())

    def loss_at_same_masks() -> torch.Tensor:
        for parameter in parameters:
            parameter.grad = None
        torch.manual_seed(7)
        return session.gradient_pass(session, batch, lambda phase: None)

    loss_at_same_masks()
    directions = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    expected = sum(float(direction.square().sum()) for direction in directions)
    half_step = 1e-5
    losses = []
    for sign in (1.0, -2.0):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=sign * half_step)
        losses.append(float(loss_at_same_masks()))
    assert (losses[0] - losses[1]) / (2 * half_step) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 5, 6])
def test_uneven_micro_batches_of_ragged_tokens_are_weighted_by_their_tokens(micro_batch_size):
    plan = plan_of(MicroBatching(micro_batch_size=micro_batch_size))
    assert memfit.verify(builders.ragged_tokens(), plan).largest_error <= EXACT


def test_a_checkpointed_step_takes_less_memory_than_the_plain_one():
    job = builders.large_residual()
    checkpointed = memfit.predict(job, plan=plan_of(ActivationCheckpointing()))
    plain = memfit.predict(job)
    assert checkpointed.peak_allocated_bytes < plain.peak_allocated_bytes
    assert checkpointed.num_flops > plain.num_flops


def test_a_streamed_loss_takes_less_memory_than_the_whole_one():
    job = builders.large_many_candidates()
    streamed = memfit.predict(job, plan=plan_of(LossChunking(num_candidates=256)))
    assert streamed.peak_allocated_bytes < 0.7 * memfit.predict(job).peak_allocated_bytes


@dataclass(frozen=True, kw_only=True)
class AnyModel(MicroBatching):
    """Micro-batch a model whatever it has inside."""

    def obstacle(self, facts):
        return None


def test_a_run_refuses_other_statistics_whatever_a_strategy_says_of_itself():
    with pytest.raises(NotSeparableError, match="takes its statistics over the whole batch"):
        memfit.verify(builders.batch_normalised(), plan_of(AnyModel(micro_batch_size=5)))
