"""Plans over ranks: the cheapest placement that fits, each with its reason, as it is recorded."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.zoo.sharded import BATCH, WIDTH, all_ranks, sharded_model, whole_model
from tests.zoo.small_jobs import mean_square_job

import memfit
from memfit import Job, Plan
from memfit.cli.job_arguments import read_rank_numbers
from memfit.errors import NoPlanFitsError, StrategyError, UsageError
from memfit.strategies import CATALOGUE, build_strategy
from memfit.strategies.data_parallel import AbstractDataParallel

BARE = tuple(kind.name for kind in CATALOGUE if not issubclass(kind, AbstractDataParallel))
ADAMW = partial(torch.optim.AdamW, foreach=False)


@pytest.fixture(scope="module")
def job() -> Job:
    return mean_square_job(whole_model, WIDTH, batch_size=2 * BATCH, optimizer=ADAMW)


def plan_with(*names: str, ranks: int | None = None) -> Plan:
    return Plan(strategies=tuple(build_strategy(name, {}) for name in names), ranks=ranks)


@pytest.fixture(scope="module")
def peaks(job) -> dict[str, int]:
    """Return what one rank takes, and what each of two does."""
    return {
        "one": memfit.predict(job).peak_allocated_bytes,
        **{
            name: memfit.predict(job, plan=plan_with(name), ranks=2).peak_allocated_bytes
            for name in ("ddp", "fsdp2")
        },
    }


@pytest.mark.slow
def test_a_planned_rank_takes_what_one_takes_that_its_job_shards(peaks):
    def sharded():
        return sharded_model(all_ranks("cpu"))

    own = mean_square_job(sharded, WIDTH, batch_size=BATCH, optimizer=ADAMW)
    found = memfit.predict(own, ranks=2).peak_allocated_bytes
    assert peaks["fsdp2"] == pytest.approx(found, abs=64)  # and what its mean is weighted by


@pytest.mark.slow
def test_more_ranks_are_taken_where_fewer_do_not_fit(job, peaks):
    assert peaks["fsdp2"] < peaks["ddp"] < peaks["one"]
    budget = (peaks["fsdp2"] + peaks["ddp"]) // 2

    roomy = memfit.plan(job, budget=2 * peaks["one"], ranks=(1, 2), forbid=BARE)
    tight = memfit.plan(job, budget=budget, ranks=(1, 2), forbid=BARE)

    assert (roomy.ranks, roomy.parallel) == (1, None)
    assert (tight.ranks, tight.parallel.name) == (2, "fsdp2")
    assert tight.prediction.ranks == 2
    assert tight.prediction.peak_allocated_bytes <= budget
    (chosen,) = (row for row in tight.placements if row.chosen)
    assert (chosen.ranks, chosen.parallel) == (2, tight.parallel.label())
    (alone,) = (row for row in tight.placements if row.ranks == 1)
    assert not alone.fits
    assert alone.reason == "no plan keeps to the budget."


@pytest.mark.slow
def test_the_fastest_placement_is_taken_where_it_is_asked_for():
    # Two ranks take six tenths of the time of one, and so more of all devices.
    job = mean_square_job(whole_model, WIDTH, batch_size=1024, optimizer=ADAMW)
    wanted = {"budget": "1GiB", "ranks": (1, 2), "forbid": BARE}
    assert memfit.plan(job, **wanted).ranks == 1
    plan = memfit.plan(job, **wanted, objective="fastest")
    rows = [row for row in plan.placements if row.fits]
    assert plan.prediction.step_seconds == min(row.step_seconds for row in rows)
    assert [row.ranks for row in rows if row.chosen] == [plan.ranks] == [2]
    with pytest.raises(UsageError, match="cheapest or fastest, not 'best'"):
        memfit.plan(job, **wanted, objective="best")


@pytest.mark.slow
def test_what_is_required_is_taken_and_what_is_forbidden_is_not(job, peaks):
    budget = 2 * peaks["one"]
    required = memfit.plan(job, budget=budget, ranks=(2,), require=("fsdp2",), forbid=BARE)
    forbidden = memfit.plan(job, budget=budget, ranks=(2,), forbid=("fsdp2", *BARE))
    assert required.parallel.name == "fsdp2"
    assert forbidden.parallel.name == "ddp"
    assert {row.parallel for row in forbidden.placements} == {"ddp"}
    with pytest.raises(StrategyError, match="all of it was forbidden"):
        memfit.plan(job, budget=budget, ranks=(2,), forbid=("ddp", "fsdp2", *BARE))


@pytest.mark.slow
def test_no_placement_names_the_smallest_peak_of_all(job):
    with pytest.raises(NoPlanFitsError) as caught:
        memfit.plan(job, budget="64KiB", ranks=(1, 2), forbid=BARE)
    with pytest.raises(NoPlanFitsError) as alone:
        memfit.plan(job, budget="64KiB", forbid=BARE)
    assert caught.value.smallest_peak_bytes < alone.value.smallest_peak_bytes


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused(job, peaks):
    budget = 2 * peaks["one"]
    with pytest.raises(UsageError, match="cannot be shared by 4 ranks"):
        memfit.plan(replace(job, batch_size=3), budget=budget, ranks=(4,))
    with pytest.raises(UsageError, match="cannot be measured here"):
        memfit.plan(job, budget=budget, ranks=(2,), measure=True)

    def in_batch(model, batch):
        found = model(batch)
        return (found @ found.T).logsumexp(1).mean()

    with pytest.raises(StrategyError, match="data parallelism"):
        memfit.plan(replace(job, loss=in_batch), budget=budget, ranks=(2,))


@pytest.mark.slow
def test_a_placement_that_torch_cannot_shard_becomes_a_row_with_the_reason():
    def model():
        return torch.nn.LSTM(8, 8, batch_first=True)

    def loss(model, batch):
        return model(batch)[0].square().mean()

    job = Job(
        model=model,
        batch=lambda size: torch.randn(size, 4, 8),
        loss=loss,
        optimizer=ADAMW,
        batch_size=4,
    )
    plan = memfit.plan(job, budget="1GiB", ranks=(2,), forbid=BARE)
    reasons = {row.parallel.partition("(")[0]: row.reason for row in plan.placements}
    assert plan.parallel.name == "ddp"
    assert "holds a parameter besides that of its module" in reasons["fsdp2"]


@pytest.mark.slow
def test_a_plan_for_ranks_is_the_same_from_its_file(job, peaks, tmp_path):
    plan = memfit.plan(job, budget=2 * peaks["one"], ranks=(2,), forbid=BARE)
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")
    assert loaded.ranks == 2
    assert loaded.strategies == plan.strategies
    assert loaded.checksum() == plan.checksum() != plan_with("fsdp2", ranks=2).checksum()


def test_a_model_that_is_there_already_cannot_be_shared():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(StrategyError, match="start runs it"):
        memfit.attach(model, optimizer, plan_with("ddp"))


@pytest.mark.parametrize("text", ["0", "two", "1,,2", "-1", "1.5", ""])
def test_numbers_of_ranks_are_whole_and_at_least_one(text):
    args = argparse.Namespace(ranks=text, devices_per_node=None)
    with pytest.raises(UsageError, match="whole numbers of at least 1"):
        read_rank_numbers(args)


@pytest.mark.parametrize("doing", [memfit.measure, memfit.verify])
def test_one_process_refuses_what_several_ranks_carry_out(job, doing):
    with pytest.raises(UsageError, match="is for 2 ranks, and one process is here"):
        doing(job, plan_with("ddp", ranks=2))
