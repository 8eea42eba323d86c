"""One rank of FSDP2 takes what its shards take, as torch's own tracker and the allocator say."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.conformance.builders import near_peak
from tests.zoo.sharded import (
    BATCH,
    NUM_PARAMETERS,
    WIDTH,
    all_ranks,
    ranks,
    sharded_model,
    sharded_step,
)
from tests.zoo.small_jobs import mean_square_job
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import memfit
from memfit.errors import HeldTensorError
from memfit.observe.allocator_events import AllocatorWatch

ADAMW = partial(torch.optim.AdamW, foreach=False)
PARAMETER_BYTES = 4 * NUM_PARAMETERS
KEEPS = pytest.mark.parametrize("reshards", [True, False], ids=["reshards", "keeps"])


def measured_peak_bytes(setup: Callable[[], Callable[[], Any]]) -> int:
    """Return the highest bytes of two steps, as the allocator reports them."""
    gc.collect()
    with AllocatorWatch() as watch:
        step = setup()
        step()
        step()
    return watch.highest_growth_bytes()


def torchs_figures(*, reshards: bool) -> dict[str, int]:
    """Return what torch's tracker finds at the peak of the second step, by its own categories."""
    mesh = all_ranks()
    with FakeTensorMode():
        model = sharded_model(mesh, reshards=reshards)
        optimizer = ADAMW(model.parameters())
        batch = torch.randn(BATCH, WIDTH)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((batch,))
        with tracker:
            for number in range(2):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                if number == 0:
                    tracker.reset_mod_stats()
        (found,) = tracker.get_tracker_snapshot("peak").values()
    return {str(name).rpartition(".")[2]: num_bytes for name, num_bytes in found.items()}


@pytest.mark.slow
@KEEPS
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_rank_takes_what_torchs_own_tracker_says(num_ranks, reshards):
    with ranks(num_ranks):
        prediction = memfit.predict_step(sharded_step(ADAMW, reshards=reshards))
        torchs = torchs_figures(reshards=reshards)
    found = prediction.by_category
    assert prediction.peak_allocated_bytes == near_peak(torchs["Total"])
    assert found["parameters"] == torchs["SHARDED_PARAM"] == PARAMETER_BYTES / num_ranks
    assert found["gradients"] == torchs["SHARDED_GRAD"]
    assert found["optimizer state"] == pytest.approx(torchs["OPT"], abs=64)
    if num_ranks > 1:  # one rank gathers nothing, and what it copies has other names here
        assert found["saved activations"] == torchs["ACT"]
        assert found["gathered parameters"] == torchs["UNSHARDED_PARAM"]
        exchanged = torchs["ALL_GATHER"] + torchs["REDUCE_SCATTER"]
        assert found["communication buffers"] == exchanged


@pytest.mark.slow
@KEEPS
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_peak_of_a_rank_is_the_measured_one(num_ranks, reshards):
    """The collectives of a fake group take the memory of their tensors and nothing besides."""
    with ranks(num_ranks):
        setup = sharded_step(ADAMW, reshards=reshards)
        predicted = memfit.predict_step(setup).peak_allocated_bytes
        assert predicted == near_peak(measured_peak_bytes(setup))


def tensor_parallel() -> nn.Module:
    """Return an MLP whose weights are split over the ranks."""
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
    return parallelize_module(model, all_ranks(), {"0": ColwiseParallel(), "1": RowwiseParallel()})


@pytest.mark.slow
@pytest.mark.parametrize("model", [lambda: sharded_model(all_ranks()), tensor_parallel])
def test_a_job_of_a_rank_is_predicted_and_measured_alike(model):
    with ranks(4):
        job = mean_square_job(model, WIDTH, batch_size=BATCH, optimizer=torch.optim.AdamW)
        prediction, measurement = memfit.predict(job), memfit.measure(job)
    assert prediction.peak_allocated_bytes == near_peak(measurement.peak_allocated_bytes)
    for category in ("parameters", "optimizer state", "batch"):
        assert prediction.by_category[category] == measurement.by_category[category]


def test_the_last_rank_of_uneven_shards_takes_less():
    """17 rows over 4 ranks are shards of 5, 5, 5 and 2 rows, which FSDP2 pads to 5."""

    def parameter_bytes(rank):
        with ranks(4, rank):
            job = mean_square_job(lambda: tensor_split(17), 16)
            return memfit.predict(job).by_category["parameters"]

    assert (parameter_bytes(0), parameter_bytes(3)) == (4 * 16 * 5, 4 * 16 * 2)


def tensor_split(num_rows: int) -> nn.Module:
    from torch.distributed.tensor import Shard, distribute_tensor

    layer = nn.Linear(16, num_rows, bias=False)
    layer.weight = nn.Parameter(
        distribute_tensor(layer.weight.detach(), all_ranks(), [Shard(0)], src_data_rank=None)
    )
    return parallelize_module(layer, all_ranks(), ColwiseParallel(use_local_output=True))


@pytest.mark.slow
@pytest.mark.parametrize("opened", ["before", "inside"])
def test_a_rank_on_a_gpu_takes_what_it_takes_on_the_cpu_and_workspaces(opened):
    setup = sharded_step(ADAMW, "cuda")

    def setup_of_all():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
        return setup()

    if opened == "inside":
        on_card = memfit.predict_step(setup_of_all, "h100-80gb")
    else:
        with ranks(4):
            on_card = memfit.predict_step(setup, "h100-80gb")
    assert not dist.is_initialized()
    with ranks(4):
        on_cpu = memfit.predict_step(sharded_step(ADAMW))
    for category in ("parameters", "gradients", "optimizer state", "temporaries"):
        expected = on_cpu.by_category[category]
        assert on_card.by_category[category] == pytest.approx(expected, abs=8192)


@pytest.mark.slow
def test_a_living_sharded_model_is_refused_and_left_as_it_was():
    with ranks(1):
        model = sharded_model(all_ranks())
        job = mean_square_job(lambda: model, WIDTH)
        for ask in (memfit.predict, memfit.measure):
            with pytest.raises(HeldTensorError, match=r"0\.0\.weight.*fully_shard"):
                ask(job)
        model(torch.randn(BATCH, WIDTH)).mean().backward()
