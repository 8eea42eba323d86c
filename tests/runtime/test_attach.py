"""A plan is attached to a loop that memfit does not own, and taken off without a trace."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.installed_transformers import part_of_transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memfit
from memfit import Job, Plan
from memfit.errors import StrategyError
from memfit.live_state import LiveState
from memfit.observe.allocator_events import AllocatorWatch
from memfit.observe.peaks import storage_bytes
from memfit.runtime.run import open_plain_session
from memfit.session.batches import find_layout
from memfit.strategies import (
    ActivationCheckpointing,
    ActivationOffload,
    AllocatorConf,
    Bf16,
    EightBitOptimizer,
    MicroBatching,
    OptimizerImplementation,
    OptimizerInBackward,
    Tiling,
)

CHECKPOINTING = ActivationCheckpointing()
FUSED = OptimizerImplementation(implementation="fused")


def plan_of(*strategies):
    return Plan(strategies=strategies)


def blocks(width: int = 8, num_blocks: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_blocks))
    )


def train(model, optimizer, num_steps: int = 3):
    """Do what a user's loop does; return the losses."""
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "plan",
    [plan_of(CHECKPOINTING), plan_of(CHECKPOINTING, FUSED), plan_of(Tiling(num_tiles=2))],
    ids=str,
)
def test_a_loop_trains_as_it_would_without(plan):
    bare, own = blocks(), blocks()
    optimizer = torch.optim.AdamW(own.parameters())
    with memfit.attach(own, optimizer, plan) as attached:
        assert attached.model is own
        assert attached.optimizer is optimizer
        losses = train(own, optimizer)
    assert losses == pytest.approx(train(bare, torch.optim.AdamW(bare.parameters())), rel=1e-6)


def test_blocks_are_really_recomputed():
    def flops_of_a_step(plan):
        model = blocks()
        optimizer = torch.optim.AdamW(model.parameters())
        with memfit.attach(model, optimizer, plan), FlopCounterMode(display=False) as counter:
            train(model, optimizer, 1)
        return counter.get_total_flops()

    forward = 3 * 2 * 4 * 8 * 8  # layers, a product each, of (4, 8) by (8, 8)
    assert flops_of_a_step(plan_of(CHECKPOINTING)) - flops_of_a_step(plan_of()) == forward


@pytest.mark.parametrize(
    "plan", [plan_of(CHECKPOINTING, FUSED), plan_of(CHECKPOINTING, EightBitOptimizer())], ids=str
)
def test_it_is_taken_off_without_a_trace(plan):
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    state = LiveState({"model": model, "optimizer": optimizer}, gradients=True)
    before = state.snapshot()
    attached = memfit.attach(model, optimizer, plan)
    assert before.changes() != () or attached.optimizer is not optimizer
    attached.detach()
    attached.detach()  # a second time does nothing
    assert before.changes() == ()
    assert attached.optimizer is optimizer


def test_a_step_with_the_optimizer_that_was_replaced_is_refused():
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    with memfit.attach(model, optimizer, plan_of(EightBitOptimizer())) as attached:
        with pytest.raises(memfit.MemfitError, match=r"attached\.optimizer"):
            train(model, optimizer)
        train(model, attached.optimizer)
    train(model, optimizer)


@pytest.mark.parametrize(
    ("strategy", "fragment"),
    [
        (MicroBatching(micro_batch_size=2), "decides how passes and updates follow"),
        (OptimizerInBackward(), "decides how passes and updates follow"),
        (Bf16(), "acts around forward and loss"),
        (ActivationOffload(to="disk"), "acts around forward and loss"),
        (AllocatorConf(conf="expandable_segments:True"), "before the process starts"),
        (ActivationCheckpointing(blocks=("no_such",)), "no_such"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_a_loop_does_not_offer_is_refused_and_nothing_is_changed(strategy, fragment):
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    before = LiveState({"model": model, "optimizer": optimizer}).snapshot()
    with pytest.raises(StrategyError, match=fragment):
        memfit.attach(model, optimizer, plan_of(CHECKPOINTING, FUSED, strategy))
    assert before.changes() == ()


def bert():
    config = part_of_transformers("BertConfig")(
        vocab_size=2000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return part_of_transformers("BertForMaskedLM")(config)


def tokens(size: int):
    ids = torch.randint(0, 2000, (size, 64))
    return {"input_ids": ids, "labels": ids.clone()}


LAYERS = ActivationCheckpointing(blocks=("bert.encoder.layer.0-3",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [plan_of(LAYERS, FUSED), plan_of(LAYERS, EightBitOptimizer())], ids=str
)
def test_the_peak_in_an_ordinary_loop_is_the_one_predicted(plan):
    job = Job(
        model=bert,
        batch=tokens,
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        batch_size=16,
    )
    predicted = memfit.predict(job, plan=plan).peak_allocated_bytes
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = tokens(16)
    with memfit.attach(model, optimizer, plan) as attached:
        session = open_plain_session(job, "cpu", find_layout(job))
        session.model, session.optimizer = model, attached.optimizer
        measured = [step_peak(session, batch) for _ in range(3)]
    assert predicted == pytest.approx(measured[-1], rel=0.01)


def step_peak(session, batch) -> int:
    """Run a step of an ordinary loop, and return the peak of what was allocated."""
    at_start = storage_bytes(session.owned_tensors(batch))
    with AllocatorWatch() as watch:
        session.model(**batch).loss.backward()
        session.optimizer.step()
        session.optimizer.zero_grad(set_to_none=True)
    return at_start + watch.highest_growth_bytes()
