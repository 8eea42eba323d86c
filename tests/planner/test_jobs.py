"""Plans for jobs of several kinds: budgets of every kind are kept, and refusals say why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import planned_jobs as planner_jobs
from tests.zoo.planned_jobs import MLP, reasons
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.errors import NoPlanFitsError, StrategyError

pytestmark = pytest.mark.slow


def contrastive_loss(model, batch):
    first, second = (F.normalize(model(part), dim=-1) for part in batch)
    scores = first @ second.T
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def contrastive() -> Job:
    """Return a job whose loss couples samples, and whose model is called twice."""
    return Job(
        model=lambda: nn.Sequential(*(MLP(32) for _ in range(3))),
        batch=lambda size: (torch.randn(size, 32), torch.randn(size, 32)),
        loss=contrastive_loss,
        optimizer=planner_jobs.sgd,
        batch_size=64,
    )


def small_transformer() -> Job:
    return planner_jobs.transformer(width=32, num_blocks=2, tokens=32, batch_size=8)


@pytest.fixture(scope="module")
def transformer() -> Job:
    return small_transformer()


@pytest.fixture(scope="module")
def plain_bytes(transformer) -> int:
    return memfit.predict(transformer).peak_allocated_bytes


@pytest.fixture(scope="module")
def planned(transformer, plain_bytes) -> Plan:
    return memfit.plan(transformer, budget=int(0.8 * plain_bytes))


def test_a_plan_with_its_ladder_is_read_back_as_it_was(planned, tmp_path):
    path = tmp_path / "plan.yaml"
    planned.save(path)
    again = Plan.load(path)
    assert again.strategies == planned.strategies
    assert again.numerics == planned.numerics
    assert again.device == planned.device
    assert planned.ladder
    assert [r.strategies for r in again.ladder] == [r.strategies for r in planned.ladder]


def test_every_rung_of_the_ladder_is_smaller_and_is_what_it_says(transformer, planned):
    peaks = [p.prediction.peak_allocated_bytes for p in (planned, *planned.ladder)]
    assert peaks == sorted(set(peaks), reverse=True)
    last = planned.ladder[-1]
    assert memfit.predict(transformer, plan=last).peak_allocated_bytes == peaks[-1]
    assert memfit.verify(transformer, last, batch_size=2).keeps_promise


def test_the_trade_around_a_plan_gets_smaller_as_it_gets_slower(planned):
    points = planned.pareto
    assert [point.is_chosen for point in points].count(True) == 1
    assert [p.step_seconds for p in points] == sorted(p.step_seconds for p in points)
    # An estimate hides nothing that was recorded, though it may be better in both.
    for is_recorded in (True, False):
        kind = [p for p in points if p.is_recorded is is_recorded and not p.is_chosen]
        assert [p.peak_bytes for p in kind] == sorted((p.peak_bytes for p in kind), reverse=True)


def test_planning_again_gives_the_same_plan(transformer, plain_bytes, planned):
    again = memfit.plan(transformer, budget=int(0.8 * plain_bytes))
    assert again.labels() == planned.labels()
    assert [r.labels() for r in again.ladder] == [r.labels() for r in planned.ladder]
    assert again.pareto == planned.pareto


def test_what_is_used_is_not_listed_as_refused(planned):
    assert not {s.name for s in planned.strategies} & reasons(planned).keys()


def test_a_loss_that_couples_samples_refuses_micro_batches_with_the_sentence():
    job = contrastive()
    budget = int(0.85 * memfit.predict(job).peak_allocated_bytes)
    plan = memfit.plan(job, budget=budget)
    reason = reasons(plan)["micro-batching"]
    assert "sample" in reason
    assert reason.endswith(".")
    assert not any("micro-batching" in label for c in plan.considered for label in c.strategies)
    with pytest.raises(StrategyError) as caught:
        memfit.plan(job, budget=budget, require=["micro-batching"])
    assert reason in str(caught.value)


def test_blocks_that_a_step_calls_twice_are_recomputed_whole():
    job = contrastive()
    budget = int(0.85 * memfit.predict(job).peak_allocated_bytes)
    forbidden = ["tiling", "optimizer-in-backward", "activation-offload", "cached-gradients"]
    plan = memfit.plan(job, budget=budget, forbid=forbidden)
    assert "activation-checkpointing" in {strategy.name for strategy in plan.strategies}
    assert memfit.verify(job, plan).largest_error <= 1e-10


def test_what_is_moved_to_the_host_keeps_to_its_budget():
    job = planner_jobs.transformer(width=256, num_blocks=4, tokens=256, batch_size=16)
    peak_bytes = memfit.predict(job, device="a100-40gb").peak_allocated_bytes
    wanted = {"device": "a100-40gb", "budget": int(0.8 * peak_bytes), "budget_of": "allocated"}
    # Pieces that are run again save nothing that could be moved.
    pieces = ["micro-batching", "cached-gradients"]
    wanted["forbid"] = ["tiling", *pieces, "optimizer-in-backward", "fused-attention"]
    free = memfit.plan(job, **wanted, require=["activation-offload"])
    assert free.prediction.host_bytes > 0
    bound = free.prediction.host_bytes // 2
    plan = memfit.plan(job, **wanted, host_memory=bound)
    assert plan.prediction.fits
    assert plan.prediction.host_bytes <= bound
    assert all(rung.prediction.host_bytes <= bound for rung in plan.ladder)


def test_nothing_is_written_to_disk_unless_there_is_room(transformer, plain_bytes):
    budget = int(0.7 * plain_bytes)
    without = memfit.plan(transformer, budget=budget)
    assert without.prediction.disk_bytes == 0
    assert "--disk" in reasons(without)["activation-offload"]
    plan = memfit.plan(transformer, budget=budget, disk=1)
    assert plan.prediction.disk_bytes <= 1
    assert plan.prediction.fits


@pytest.mark.parametrize(("device", "budget_of"), [("cpu", "allocated"), ("t4", "process")])
def test_an_impossible_budget_names_the_smallest_peak_and_how_it_is_reached(
    transformer, device, budget_of
):
    with pytest.raises(NoPlanFitsError) as caught:
        memfit.plan(
            transformer,
            device=device,
            budget="100KiB",
            budget_of=budget_of,
            forbid=["tiling", "optimizer-in-backward", "activation-offload"],
        )
    error = caught.value
    assert error.smallest_peak_bytes > error.budget_bytes
    plain = memfit.predict(transformer, device=device).bounded_bytes(budget_of)
    assert error.smallest_peak_bytes <= plain
    assert sum(error.by_category.values()) == error.smallest_peak_bytes
