"""A checkpoint takes time of the host for its hooks, besides what it runs again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit import Job, Plan, predict
from memfit.cost.checkpoints import CheckpointedBlock, checkpoint_seconds
from memfit.cost.operator_times import OperatorTimes
from memfit.devices.catalogue import load_device
from memfit.planner.recompute.blocks import chain_of
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import record
from memfit.session.batches import find_layout
from memfit.strategies.activation_checkpointing import ActivationCheckpointing

DEVICE = load_device("cpu")
NUM_BLOCKS = 3


def a_block(num_operators=10, *, forward_seconds=0.0, again_seconds=0.0, chooses=False):
    return CheckpointedBlock(
        num_operators=num_operators,
        forward_seconds=forward_seconds,
        again_seconds=again_seconds,
        chooses=chooses,
    )


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
    hooks = 2 * checkpoint_seconds(a_block(num_operators, chooses=bool(keep)), DEVICE)
    computed = OperatorTimes(device=DEVICE).step_seconds(recording.steady)
    assert hooks > 0
    assert prediction.step_seconds == pytest.approx(computed + hooks)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_what_chooses_takes_longer(device):
    whole, chosen = (
        checkpoint_seconds(a_block(chooses=chooses), load_device(device))
        for chooses in (False, True)
    )
    assert 0 < whole < chosen


def test_a_card_that_computes_longer_is_not_held_up():
    h200 = load_device("h200")
    seconds = [
        checkpoint_seconds(a_block(chooses=True, forward_seconds=each), h200)
        for each in (0.0002, 0.0005, 0.01)
    ]
    assert seconds[0] > seconds[1] > seconds[2] == 0.0
    again = a_block(chooses=True, forward_seconds=0.0005, again_seconds=0.0001)
    assert checkpoint_seconds(again, h200) == pytest.approx(seconds[1] - 0.0001)


def test_a_processor_is_held_up_however_long_it_computes():
    blocks = (a_block(forward_seconds=each, again_seconds=each) for each in (0.0, 1.0))
    assert len({checkpoint_seconds(block, DEVICE) for block in blocks}) == 1


def test_a_host_that_is_late_anyway_is_no_fault_of_the_checkpoint():
    h200 = load_device("h200")
    tiny = checkpoint_seconds(a_block(forward_seconds=1e-6), h200)
    small = checkpoint_seconds(a_block(forward_seconds=5e-5), h200)
    assert tiny == pytest.approx(small)


def test_on_a_card_a_plan_pays_for_checkpoints_that_the_card_does_not_cover():
    plain, planned = (
        predict(small_job(), "h200", Plan(strategies=strategies)).step_seconds
        for strategies in ((), (ActivationCheckpointing(blocks=("0-1",)),))
    )
    hooks = 2 * checkpoint_seconds(a_block(3), load_device("h200"))
    assert planned - plain > 0.8 * hooks


def test_a_block_that_would_be_recomputed_is_priced_with_its_hooks():
    recording, _ = recorded()
    seconds = OperatorTimes(device=DEVICE).seconds
    hooks = lambda block: 1.0 + block.num_operators + 100 * block.chooses  # noqa: E731
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
