"""Data-parallel training, recorded as one of its processes sees it."""

from __future__ import annotations

import pytest
import torch
from tests.virtual.steps import training
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from memfit.devices.catalogue import load_device
from memfit.errors import RecordingError
from memfit.prediction.recording import record_steps
from memfit.trace.events import Category

FLOAT = 4
WIDTH = 1024


def recorded(wrap):
    def model():
        torch.distributed.init_process_group("nccl")
        return wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda())

    return record_steps(training(model, 2, WIDTH), load_device("a100-40gb"))


def bucket_bytes(recording, category=Category.COMMUNICATION) -> list[list[int]]:
    """Return the buckets alive at the end of each of two steps."""
    found = []
    for step in (recording.first, recording.steady):
        alive = dict.fromkeys(event for event in step.events if event >= 0)
        for event in step.events:
            if event < 0:
                del alive[-1 - event]
        blocks = [step.allocations[index] for index in alive]
        found.append([each.num_bytes for each in blocks if each.category is category])
    return found


LAYER = (WIDTH * WIDTH + WIDTH) * FLOAT


def test_the_first_step_has_one_bucket_and_later_ones_begin_with_a_small_one():
    recording = recorded(nn.parallel.DistributedDataParallel)
    assert bucket_bytes(recording) == [[2 * LAYER], [LAYER, LAYER]]


def test_a_bucket_ends_where_its_cap_is_reached():
    recording = recorded(
        lambda model: nn.parallel.DistributedDataParallel(model, bucket_cap_mb=100)
    )
    assert bucket_bytes(recording) == [[2 * LAYER], [2 * LAYER]]


def test_where_unused_parameters_are_looked_for_there_are_buckets_at_once():
    """They follow the order of the parameters, so the first one ends with the first weight."""
    recording = recorded(
        lambda model: nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    )
    bias = WIDTH * FLOAT
    assert bucket_bytes(recording) == 2 * [[LAYER - bias, LAYER + bias]]


def test_gradients_that_are_views_of_the_buckets_take_nothing_more():
    recording = recorded(
        lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    )
    assert bucket_bytes(recording) == [[], []]
    assert bucket_bytes(recording, Category.GRADIENTS) == [[2 * LAYER], [LAYER, LAYER]]


def test_what_is_not_followed_is_refused():
    def with_hook(model):
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_comm_hook(None, fp16_compress_hook)
        return wrapped

    with pytest.raises(RecordingError, match="fp16_compress_hook"):
        recorded(with_hook)
    with pytest.raises(RecordingError, match="mixed_precision"):
        recorded(lambda model: nn.parallel.DistributedDataParallel(model, mixed_precision=object()))


def test_what_a_process_group_says_is_back_to_normal_afterwards():
    recorded(nn.parallel.DistributedDataParallel)
    assert not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="process group"):
        torch.distributed.get_rank(object())
