"""Data-parallel training, recorded as one of its processes sees it."""

from __future__ import annotations

import pytest
import torch
from tests.virtual.steps import training
from torch import nn

from memfit.devices.catalogue import load_device
from memfit.prediction.recording import record_steps

FLOAT = 4
WIDTH = 1024


def recorded(wrap):
    def model():
        torch.distributed.init_process_group("nccl")
        return wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda())

    return record_steps(training(model, 2, WIDTH), load_device("a100-40gb"))


def bucket_bytes(recording) -> list[int]:
    found = [a.num_bytes for a in recording.history.allocations if a.operator == "new_empty"]
    return [num_bytes for num_bytes in found if num_bytes >= WIDTH]


def test_buckets_take_as_much_as_the_gradients_and_the_first_one_is_small():
    recording = recorded(nn.parallel.DistributedDataParallel)
    layer = (WIDTH * WIDTH + WIDTH) * FLOAT
    assert bucket_bytes(recording) == [layer, layer]


def test_a_bucket_ends_where_its_cap_is_reached():
    recording = recorded(
        lambda model: nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100)
    )
    assert sum(bucket_bytes(recording)) == 2 * (WIDTH * WIDTH + WIDTH) * FLOAT


def test_gradients_that_are_views_of_the_buckets_take_nothing_more():
    recording = recorded(
        lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    )
    assert bucket_bytes(recording) == []


def test_what_a_process_group_says_is_back_to_normal_afterwards():
    recorded(nn.parallel.DistributedDataParallel)
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="process group"):
        torch.distributed.get_rank(object())
