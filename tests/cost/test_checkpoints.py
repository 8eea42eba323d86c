"""A checkpoint takes time of the host for its hooks, besides what it runs again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit import Job, Plan, predict
from memfit.cost.checkpoints import checkpoint_seconds
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import load_device
from memfit.planner.recompute.blocks import chain_of
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import record
from memfit.session.batches import find_layout
from memfit.strategies.activation_checkpointing import ActivationCheckpointing

DEVICE = load_device("cpu")
NUM_BLOCKS = 3


def small_job():
    block = lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Sigmoid())  # noqa: E731
    return Job(
        model=lambda: nn.Sequential(*(block() for _ in range(NUM_BLOCKS))),
        batch=lambda size: torch.randn(size, 16),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=64,
    )


def recorded(*strategies):
    job = small_job()
    plan = Plan(strategies=strategies)
    return record(job, plan, find_layout(job), device=DEVICE), predict(job, "cpu", plan)


@pytest.mark.parametrize("keep", [(), ("addmm.0",)])
def test_a_plan_pays_for_its_checkpoints(keep):
    recording, prediction = recorded(ActivationCheckpointing(blocks=("0-1",), keep=keep))
    (call,) = (each for each in recording.steady.calls if each.module == "0" and "f" in each.phase)
    num_operators = call.last_operation - call.first_operation
    hooks = 2 * checkpoint_seconds(num_operators, DEVICE, chooses=bool(keep))
    computed = OperatorTimes(device=DEVICE).step_seconds(recording.steady)
    assert hooks > 0
    assert prediction.step_seconds == pytest.approx(computed + hooks)


def test_what_chooses_takes_longer_and_a_card_is_not_held_up():
    assert checkpoint_seconds(10, DEVICE, chooses=True) > checkpoint_seconds(
        10, DEVICE, chooses=False
    )
    assert checkpoint_seconds(10, load_device("h200"), chooses=True) == 0.0


def test_a_block_that_would_be_recomputed_is_priced_with_its_hooks():
    recording, _ = recorded()
    seconds = OperatorTimes(device=DEVICE).seconds
    hooks = lambda num_operators, chooses: 1.0 + num_operators + 100 * chooses  # noqa: E731
    without = chain_of(recording.steady, rules_of(DEVICE), seconds)
    found = chain_of(recording.steady, rules_of(DEVICE), seconds, hooks_of=hooks)
    pairs = [
        (mine, other)
        for block, bare in zip(found.blocks, without.blocks, strict=True)
        for mine, other in zip(block.options, bare.options, strict=True)
    ]
    assert any(mine.recomputes for mine, _ in pairs)
    for mine, other in pairs:
        added = mine.seconds - other.seconds
        assert (added == 0) if not mine.recomputes else (added > (100 if mine.keep else 1))
