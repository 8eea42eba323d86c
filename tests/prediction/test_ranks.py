"""One rank of several is predicted without the others: its shards, what it gathers and exchanges."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.zoo.sharded import BATCH, NUM_PARAMETERS, WIDTH, all_ranks, sharded_model, sharded_step
from tests.zoo.small_jobs import mean_square_job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memfit
from memfit.errors import JobFunctionError, UsageError

ADAMW = partial(torch.optim.AdamW, foreach=False)
PARAMETER_BYTES = 4 * NUM_PARAMETERS
BLOCK_BYTES = PARAMETER_BYTES // 4


def sharded_here(**options):
    """Return a sharded model on the device of the recording."""
    return sharded_model(all_ranks("cuda" if torch.cuda.is_available() else "cpu"), **options)


def sharded_job(**options):
    model = partial(sharded_here, **options)
    return mean_square_job(model, WIDTH, batch_size=BATCH, optimizer=ADAMW)


def data_parallel_job(**options):
    def model():
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        return nn.parallel.DistributedDataParallel(layers, **options)

    return mean_square_job(model, WIDTH, batch_size=BATCH, optimizer=ADAMW)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_rank_holds_its_shards_and_gathers_blocks(num_ranks):
    found = memfit.predict(sharded_job(), ranks=num_ranks, rank=1)
    assert (found.ranks, found.rank) == (num_ranks, 1)
    assert found.by_category["parameters"] == PARAMETER_BYTES // num_ranks
    assert found.by_category["gathered parameters"] == BLOCK_BYTES
    assert found.by_category["communication buffers"] % BLOCK_BYTES == 0
    assert not dist.is_initialized()


@pytest.mark.slow
def test_gloo_stages_what_a_collective_moves():
    """Without a placement the group is the caller's own, and nobody says that it is gloo."""
    found = memfit.predict(sharded_job(), ranks=4).by_category
    assert found["gloo staging"] == BLOCK_BYTES
    on_card = memfit.predict(sharded_job(), "a100-40gb", ranks=4).by_category
    assert "gloo staging" not in on_card
    alone = memfit.predict(mean_square_job(lambda: nn.Linear(WIDTH, WIDTH), WIDTH)).by_category
    assert not {"gloo staging", "gathered parameters", "communication buffers"} & {*alone}


@pytest.mark.slow
def test_what_is_kept_after_forward_is_gathered_to_the_end():
    timeline = memfit.predict(sharded_job(reshards=False), ranks=4).timeline
    assert max(timeline.by_category["gathered parameters"]) == PARAMETER_BYTES


@pytest.mark.slow
def test_the_parts_of_a_timeline_add_up():
    timeline = memfit.predict(sharded_job(), ranks=4).timeline
    totals = [sum(parts) for parts in zip(*timeline.by_category.values(), strict=True)]
    assert totals == list(timeline.allocated_bytes)
    assert max(timeline.by_category["gathered parameters"]) == BLOCK_BYTES
    assert timeline.by_category["communication buffers"][-1] == 0


@pytest.mark.slow
def test_uneven_shards_leave_the_last_rank_less():
    def model():
        layer = nn.Linear(16, 17, bias=False)
        fully_shard(layer, mesh=all_ranks())
        return layer

    job = mean_square_job(model, 16)
    found = [memfit.predict(job, ranks=4, rank=rank).by_category["parameters"] for rank in (0, 3)]
    assert found == [4 * 16 * 5, 4 * 16 * 5]  # padded: the same for all
    assert memfit.predict(job, ranks=4, rank=3).by_category["optimizer state"] < 2 * found[1]


@pytest.mark.slow
def test_gradients_are_clipped_over_all_shards():
    job = replace(sharded_job(), clip_grad_norm=1.0)
    clipped = memfit.predict(job, ranks=4).peak_allocated_bytes
    assert clipped == pytest.approx(memfit.predict(sharded_job(), ranks=4).peak_allocated_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "a100-40gb"])
def test_data_parallel_ranks_hold_everything_and_buckets(device):
    found = memfit.predict(data_parallel_job(), device, ranks=4).by_category
    parameter_bytes = 2 * 4 * (WIDTH**2 + WIDTH)
    for category in ("parameters", "gradients", "communication buffers"):
        assert found[category] == pytest.approx(parameter_bytes, abs=4096)
    views = data_parallel_job(gradient_as_bucket_view=True)
    found = memfit.predict(views, device, ranks=4).by_category
    assert found.get("communication buffers", 0) == 0


@pytest.mark.slow
def test_any_step_is_recorded_as_a_rank_too():
    step = memfit.predict_step(sharded_step(ADAMW), ranks=4, rank=3)
    assert (step.ranks, step.rank) == (4, 3)
    assert step.by_category["gathered parameters"] == BLOCK_BYTES


@pytest.mark.slow
def test_a_placement_says_all_of_it():
    placement = memfit.Placement(device="a100-40gb", num_ranks=4, rank=2, devices_per_node=2)
    found = memfit.predict(sharded_job(), placement=placement)
    assert (found.device, found.ranks, found.rank) == ("a100-40gb", 4, 2)
    assert memfit.Prediction.from_json(found.to_json()).rank == 2


@pytest.mark.slow
def test_a_rank_finds_its_card_by_its_number_on_the_machine():
    def model():
        number = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(number)
        layer = nn.Linear(WIDTH, WIDTH).to(f"cuda:{number}")
        return nn.parallel.DistributedDataParallel(layer, device_ids=[number])

    job = mean_square_job(model, WIDTH)
    placement = memfit.Placement(device="a100-40gb", num_ranks=8, rank=7, devices_per_node=4)
    found = memfit.predict(job, placement=placement)
    assert found.by_category["parameters"] >= 4 * WIDTH**2
    one = memfit.Placement(device="a100-40gb", num_ranks=8, rank=4, devices_per_node=4)
    assert memfit.predict(job, placement=one).peak_allocated_bytes == found.peak_allocated_bytes


@pytest.mark.slow
def test_nccl_is_added_with_its_bounds_on_a_card_alone():
    mesh = partial(init_device_mesh, "cuda", (2, 2), mesh_dim_names=("replicated", "sharded"))

    def model():
        layer = nn.Linear(WIDTH, WIDTH)
        fully_shard(layer, mesh=mesh())
        return layer

    def nccl(found):
        return [term for term in found.terms if term.name == "NCCL"]

    found = memfit.predict(mean_square_job(model, WIDTH), "a100-40gb", ranks=4)
    (term,) = nccl(found)
    assert term.source.startswith("3 communicator(s) of [4, 2, 2] ranks")
    assert found.process_bytes == sum(each.num_bytes for each in found.terms)
    interval = found.intervals["process"]
    assert interval.high_bytes - interval.low_bytes > 2 * term.num_bytes
    assert interval.low_bytes < found.process_bytes < interval.high_bytes
    assert not nccl(memfit.predict(data_parallel_job(), ranks=4))
    assert not nccl(memfit.predict(data_parallel_job(), "a100-40gb", ranks=1))


@pytest.mark.slow
def test_where_gloo_frees_late_a_rank_takes_more():
    found = memfit.predict(sharded_job(), ranks=4)
    interval = found.intervals["allocated"]
    assert interval.low_bytes == found.peak_allocated_bytes
    assert interval.high_bytes - interval.low_bytes in (BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert not memfit.predict(data_parallel_job(), ranks=4).intervals


def test_ranks_that_make_no_sense_are_refused():
    job = data_parallel_job()
    with pytest.raises(UsageError, match="no rank 4 among 4"):
        memfit.predict(job, ranks=4, rank=4)
    with pytest.raises(UsageError, match="ranks=N"):
        memfit.predict(job, rank=1)


def test_a_job_that_wants_ranks_is_told_how_to_ask_for_them():
    with pytest.raises(JobFunctionError, match="--ranks"):
        memfit.predict(sharded_job())
