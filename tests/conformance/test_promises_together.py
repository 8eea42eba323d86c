"""Promises that strategies make for particular models."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
import torch
from tests.zoo.small_jobs import session_of

import memfit
from memfit import Plan
from memfit.errors import NotSeparableError, StrategyError
from memfit.strategies import build_strategy
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.eight_bit_optimizer import EightBitOptimizer
from memfit.strategies.loss_chunking import LossChunking
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.optimizer_in_backward import OptimizerInBackward

from . import builders, entries_optimizer, entries_precision

EXACT = 1e-10


def plan_of(*strategies) -> Plan:
    return Plan(strategies=strategies)


@pytest.mark.slow
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


OF_OPTIMIZERS = (*entries_optimizer.ENTRIES, *entries_precision.ENTRIES)
CHECKPOINTED = [
    *((job, (entry.settings[0],)) for entry in OF_OPTIMIZERS for job in entry.jobs[:3]),
    (entries_optimizer.trained_by_adamw, (EightBitOptimizer(), OptimizerInBackward())),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "strategies"),
    [
        pytest.param(*case, id=f"{plan_of(*case[1]).labels()[-1]}-{case[0].__name__}")
        for case in CHECKPOINTED
    ],
)
def test_a_checkpoint_goes_on_to_the_same_bits(job, strategies):
    job, plan = job(), plan_of(*strategies)
    with memfit.start(job, plan) as run, memfit.start(job, plan) as resumed:
        batches = [job.batch(job.batch_size) for _ in range(3)]
        run.step(batches[0])
        run.step(batches[1])
        file = io.BytesIO()
        torch.save(run.state_dict(), file)
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        for each in (run, resumed):
            torch.manual_seed(3)
            each.step(batches[2])
        assert run.num_steps == resumed.num_steps == 3
        for mine, other in zip(run.model.parameters(), resumed.model.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.slow
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


@pytest.mark.slow
def test_blocks_may_be_treated_differently():
    job = builders.residual()
    plan = plan_of(
        ActivationCheckpointing(blocks=("0-1",)),
        ActivationCheckpointing(blocks=("3",), keep=("addmm.0",)),
    )
    assert memfit.verify(job, plan).largest_error <= EXACT


@pytest.mark.slow
def test_replay_updates_running_statistics_as_one_step_on_the_whole_batch_does():
    job = builders.batch_normalised()
    found = memfit.verify(job, plan_of(BatchNormReplay(micro_batch_size=3)))
    assert found.buffer_error <= EXACT
    run = memfit.start(job, plan_of(BatchNormReplay(micro_batch_size=3)))
    for _ in range(3):
        run.step(job.batch(job.batch_size))
    counts = [value for name, value in run.model.named_buffers() if "num_batches" in name]
    assert [int(count) for count in counts] == [3] * 4


@pytest.mark.slow
def test_replay_draws_the_same_dropout_masks_in_all_of_its_passes():
    """With fixed masks the gradient says how the loss changes along itself; else it does not."""
    job = builders.batch_normalised(rate=0.4)
    session = session_of(job)
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


@pytest.mark.slow
def test_a_streamed_loss_takes_less_memory_than_the_whole_one():
    job = builders.large_many_candidates()
    streamed = memfit.predict(job, plan=plan_of(LossChunking(num_candidates=256)))
    assert streamed.peak_allocated_bytes < 0.7 * memfit.predict(job).peak_allocated_bytes


@dataclass(frozen=True, kw_only=True)
class AnyModel(MicroBatching):
    """Micro-batch a model whatever it has inside."""

    def obstacle(self, facts):
        return None


@pytest.mark.slow
def test_a_run_refuses_other_statistics_whatever_a_strategy_says_of_itself():
    with pytest.raises(NotSeparableError, match="takes its statistics over the whole batch"):
        memfit.verify(builders.batch_normalised(), plan_of(AnyModel(micro_batch_size=5)))
