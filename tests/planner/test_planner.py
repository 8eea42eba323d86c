"""The planner finds the fastest plan that fits, says why, and says how far off it is if none does."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.planned_jobs import MLP, reasons
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Job
from memfit.errors import NoPlanFitsError, StrategyError, UnknownDeviceError, UsageError
from memfit.planner.search.options import search_space
from memfit.prediction.recording import record
from memfit.strategies.bf16 import Bf16
from memfit.strategies.micro_batching import MicroBatching


@pytest.fixture(scope="module")
def job() -> Job:
    return mean_square_job(
        lambda: nn.Sequential(*(MLP(16) for _ in range(4))),
        20,
        16,
        batch_size=6,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )


@pytest.fixture(scope="module")
def plain_bytes(job) -> int:
    return memfit.predict(job).peak_allocated_bytes


@pytest.mark.slow
def test_the_plan_of_a_job_keeps_to_the_budget_and_runs_within_it(job, plain_bytes):
    budget_bytes = int(0.7 * plain_bytes)
    plan = memfit.plan(job, budget=budget_bytes)
    assert plan.strategies
    assert plan.prediction.fits
    assert plan.prediction.budget_bytes == budget_bytes
    assert plan.prediction.peak_allocated_bytes <= budget_bytes
    assert memfit.measure(job, plan).peak_allocated_bytes <= budget_bytes
    assert memfit.verify(job, plan).largest_error < 1e-9


@pytest.mark.slow
def test_smaller_budgets_give_plans_that_are_no_faster(job, plain_bytes):
    plans = [memfit.plan(job, budget=int(fraction * plain_bytes)) for fraction in (1.0, 0.8, 0.6)]
    seconds = [plan.prediction.step_seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


@pytest.fixture(scope="module")
def impossible(job) -> NoPlanFitsError:
    """Return the error of a budget that is below the parameters alone."""
    with pytest.raises(NoPlanFitsError) as caught:
        memfit.plan(job, budget="10KiB")
    return caught.value


@pytest.mark.slow
def test_an_impossible_budget_names_the_smallest_peak_and_what_holds_it(impossible):
    assert impossible.exit_code == 3
    assert impossible.budget_bytes == 10 * 1024
    assert impossible.smallest_peak_bytes > impossible.budget_bytes
    assert sum(impossible.by_category.values()) == impossible.smallest_peak_bytes
    message = str(impossible)
    assert "No plan fits the budget of 10.0 KiB" in message
    assert "parameters" in message
    assert "optimizer state" in message
    assert "--allow bf16" in message
    assert "Raise the budget" in message


@pytest.mark.slow
def test_the_smallest_peak_named_can_be_reached(job, impossible):
    plan = memfit.plan(job, budget=impossible.smallest_peak_bytes)
    assert plan.prediction.peak_allocated_bytes <= impossible.smallest_peak_bytes


@pytest.mark.slow
def test_what_changes_results_is_used_only_if_it_is_allowed(job):
    facts = record(job).facts
    names = {each.strategy for each in search_space(facts).refused}
    assert "bf16" in names
    for allow in (["bf16"], ["approximate"]):
        options = search_space(facts, allow).options
        assert any(Bf16() in members for members in options)
        assert any(None in members for members in options), "allowed is not required"


@pytest.mark.slow
def test_a_required_strategy_is_in_every_plan_without_being_allowed(job):
    plan = memfit.plan(job, require=["bf16", "activation-checkpointing"])
    names = {strategy.name for strategy in plan.strategies}
    assert {"bf16", "activation-checkpointing"} <= names
    assert plan.numerics == "approximate"


@pytest.mark.slow
def test_required_micro_batches_are_made_though_the_batch_fits(job):
    plan = memfit.plan(job, require=["micro-batching"])
    assert MicroBatching(micro_batch_size=3) in plan.strategies


@pytest.mark.slow
def test_what_is_forbidden_is_in_no_plan(job, plain_bytes):
    budget_bytes = int(0.8 * plain_bytes)
    chosen = {strategy.name for strategy in memfit.plan(job, budget=budget_bytes).strategies}
    forbidden = sorted(chosen - {"optimizer-implementation"})
    plan = memfit.plan(job, budget=budget_bytes, forbid=forbidden)
    assert forbidden
    assert not {strategy.name for strategy in plan.strategies} & set(forbidden)
    assert {name: reasons(plan)[name] for name in forbidden} == dict.fromkeys(
        forbidden, "it was forbidden."
    )


@pytest.mark.slow
def test_a_required_strategy_that_cannot_apply_is_refused_with_the_reason(job):
    with pytest.raises(StrategyError, match="no batch normalisation"):
        memfit.plan(job, require=["batchnorm-replay"])
    with pytest.raises(StrategyError, match="loss-chunking"):
        memfit.plan(job, require=["loss-chunking"])


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        pytest.param({"allow": ["bf17"]}, "Nearest: bf16", marks=pytest.mark.slow),
        pytest.param(
            {"require": ["micro-batch"]}, "Nearest: micro-batching", marks=pytest.mark.slow
        ),
        pytest.param(
            {"require": ["approximate"]}, "there is no such strategy", marks=pytest.mark.slow
        ),
        pytest.param({"forbid": ["bf17"]}, "Nearest: bf16", marks=pytest.mark.slow),
        pytest.param(
            {"require": ["bf16"], "forbid": ["bf16"]},
            "both required and forbidden",
            marks=pytest.mark.slow,
        ),
        ({"budget": "plenty"}, "'plenty' is not a size"),
        ({"budget": 0}, "more than 0 bytes"),
        ({"budget": -5}, "The budget must be more than 0 bytes, not -5"),
        ({"host_memory": 0}, "The host memory must be more than 0 bytes, not 0"),
        ({"host_memory": "lots"}, "The host memory 'lots' is not a size"),
        ({"disk": "0GiB"}, "The disk space must be more than 0 bytes, not 0GiB"),
        ({"disk": "lots"}, "The disk space 'lots' is not a size"),
        ({"budget_of": "stack"}, "one of allocated, reserved, process"),
    ],
)
def test_words_that_make_no_sense_are_refused(job, arguments, fragment):
    with pytest.raises(UsageError, match=fragment) as caught:
        memfit.plan(job, **arguments)
    assert caught.value.exit_code == 2


def test_an_unknown_device_is_refused_with_near_names(job):
    with pytest.raises(UnknownDeviceError, match="a100"):
        memfit.plan(job, device="a100")


@pytest.mark.slow
def test_the_budget_of_a_gpu_is_its_memory_and_bounds_the_process(job):
    plan = memfit.plan(job, device="t4")
    assert plan.prediction.budget_of == "process"
    assert plan.prediction.budget_bytes > 14 * 10**9
    assert plan.prediction.process_bytes > plan.prediction.peak_reserved_bytes
    assert plan.prediction.certainty == "table"


@pytest.mark.slow
def test_a_budget_may_bound_another_figure(job, plain_bytes):
    with pytest.raises(NoPlanFitsError):
        memfit.plan(job, budget=plain_bytes, budget_of="process")


@pytest.mark.slow
def test_refused_strategies_are_listed_with_their_reasons(job):
    refused = reasons(memfit.plan(job))
    assert set(refused) >= {"loss-chunking", "batchnorm-replay", "bf16", "allocator-settings"}
    assert all(reason.strip() for reason in refused.values())


@pytest.mark.slow
def test_progress_is_told_of_every_recording(job, plain_bytes):
    told: list[str] = []
    plan = memfit.plan(job, budget=int(0.8 * plain_bytes), progress=told.append)
    assert len(told) == len(plan.considered) + len(plan.approximations)
    assert told[0] == "as it is"
    assert plan.considered[0].chosen


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.5, 0.8, 0.95, 1.0])
def test_whatever_the_budget_the_plan_that_is_given_fits(fraction):
    small = mean_square_job(
        lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)), 8, batch_size=64
    )
    budget_bytes = int(fraction * memfit.predict(small).peak_allocated_bytes)
    plan = memfit.plan(small, budget=budget_bytes)
    assert plan.prediction.peak_allocated_bytes <= budget_bytes
    again = memfit.predict(small, plan=plan)
    assert again.peak_allocated_bytes == plan.prediction.peak_allocated_bytes
