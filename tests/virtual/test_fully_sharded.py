"""``FullyShardedDataParallel`` as one of several ranks sees it, against sums by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memfit
from memfit.devices.catalogue import load_device
from memfit.devices.placement import Placement
from memfit.prediction.recording import record_steps
from memfit.trace.events import Category
from memfit.virtual.fully_sharded import Chunks
from memfit.virtual.process_group import one_rank_of

WIDTH, NUM_LAYERS, NUM_RANKS, FLOAT = 1024, 4, 4, 4
LAYER = (WIDTH * WIDTH + WIDTH) * FLOAT


class Layer(nn.Linear):
    pass


def setup(**options):
    def build():
        model = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(NUM_LAYERS))).cuda()
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            device_id=torch.cuda.current_device(),
            **options,
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        batch = torch.randn(2, WIDTH, device="cuda")

        def step():
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

        return step

    return build


def recorded(**options):
    device = "a100-40gb"
    with one_rank_of(Placement(device=device, num_ranks=NUM_RANKS)):
        return record_steps(setup(**options), load_device(device))


def alive_at_the_end(trace) -> list[int]:
    alive = dict.fromkeys(event for event in trace.events if event >= 0)
    for event in trace.events:
        if event < 0:
            del alive[-1 - event]
    return [trace.allocations[index].num_bytes for index in alive]


@pytest.mark.slow
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_rank_keeps_its_shards_with_their_gradients_and_states(use_orig_params):
    recording = recorded(use_orig_params=use_orig_params)
    kept = [size for size in alive_at_the_end(recording.steady) if size == LAYER // NUM_RANKS]
    assert len(kept) == 4 * NUM_LAYERS  # shard, gradient and two states of each layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "num_gathered"), [("FULL_SHARD", 2), ("SHARD_GRAD_OP", NUM_LAYERS)]
)
def test_gathered_layers_are_freed_after_forward_or_kept_for_backward(strategy, num_gathered):
    """With FULL_SHARD a layer and the next one, gathered ahead in backward, live at once."""
    steady = recorded(sharding_strategy=ShardingStrategy[strategy]).steady
    current = highest = 0
    for index, delta in steady.deltas():
        if steady.allocations[index].category is Category.GATHERED_PARAMETERS:
            current += delta
            highest = max(highest, current)
    assert highest == num_gathered * LAYER


@pytest.mark.slow
def test_gathered_parameters_are_taken_on_a_stream_of_their_own():
    steady = recorded().steady
    streams = {
        each.stream
        for each in steady.allocations
        if each.category is Category.GATHERED_PARAMETERS and each.num_bytes
    }
    assert len(streams) == 1
    assert streams != {0}


@pytest.mark.slow
def test_parameters_in_bfloat16_are_gathered_in_half_the_bytes():
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    steady = recorded(mixed_precision=bf16).steady
    gathered = {
        each.num_bytes
        for each in steady.allocations
        if each.category is Category.GATHERED_PARAMETERS and each.num_bytes > LAYER // NUM_RANKS
    }
    assert gathered == {LAYER // 2}


@pytest.mark.slow
def test_the_prediction_names_what_is_gathered():
    found = memfit.predict_step(setup(), "a100-40gb", ranks=NUM_RANKS)
    assert found.ranks == NUM_RANKS
    assert found.by_category["optimizer state"] >= 2 * NUM_LAYERS * LAYER // NUM_RANKS
    assert (
        found.peak_allocated_bytes
        < memfit.predict_step(
            setup(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), "a100-40gb", ranks=NUM_RANKS
        ).peak_allocated_bytes
    )


@pytest.mark.parametrize("shape", [(8, 3), (7, 3), (5,), (1, 4), (9,)])
@pytest.mark.parametrize("num_chunks", [1, 3, 4, 8])
def test_chunks_made_when_asked_for_are_those_of_torch(shape, num_chunks):
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    expected = list(torch.chunk(tensor, num_chunks))
    expected += [tensor.new_empty(0)] * (num_chunks - len(expected))
    found = Chunks(tensor, num_chunks, dim=0)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(found[-1], expected[-1])
    with pytest.raises(IndexError):
        found[num_chunks]


def sharded_after_meta(*, on_meta: bool):
    """Shard two layers that are made without memory, or on the card, and give them memory."""

    def build():
        mesh = init_device_mesh("cuda", (NUM_RANKS,))
        with torch.device("meta" if on_meta else "cuda"):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if on_meta:
            model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        batch = torch.randn(2, WIDTH, device="cuda")

        def step():
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

        return step

    return build


@pytest.mark.slow
def test_a_model_made_without_memory_takes_what_one_made_on_the_card_takes():
    meta, card = (
        memfit.predict_step(sharded_after_meta(on_meta=each), "a100-40gb", ranks=NUM_RANKS)
        for each in (True, False)
    )
    assert meta.by_category == card.by_category
    assert meta.peak_allocated_bytes == card.peak_allocated_bytes


def test_what_dtensor_asks_after_shapes_takes_no_memory():
    """With an odd width, as what was asked before is remembered."""
    width = 1031

    def setup():
        mesh = init_device_mesh("cuda", (NUM_RANKS,))
        with torch.device("meta"):
            model = nn.Linear(width, width * NUM_RANKS, bias=False)
        parallelize_module(model, mesh, ColwiseParallel())
        model.to_empty(device="cuda")
        return lambda: None

    device = "a100-40gb"
    with one_rank_of(Placement(device=device, num_ranks=NUM_RANKS)):
        history = record_steps(setup, load_device(device)).history
    assert max(each.num_bytes for each in history.allocations) == width * width * FLOAT
