"""A sharded model trains on as if nothing had been, whichever rank runs out of memory where."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from tests.runtime import sharded_faults
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import spawn

import memfit
from memfit import Job
from memfit.live_state import LiveState
from memfit.runtime.guard.batch_file import BatchFile
from memfit.runtime.shards.connections import between_ranks, end
from memfit.runtime.shards.cut_passes import CutPasses
from memfit.runtime.shards.group_holders import GroupHolders
from memfit.runtime.shards.whole_job import make_whole, whole_job


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_changes_no_weights(tmp_path: Path) -> None:
    """On two ranks, under each kind of smaller plan, in forward, backward, clipping and update."""
    numbers = [*range(9)]
    arguments = (2, str(tmp_path / "store"), str(tmp_path), numbers)
    spawn(sharded_faults.fails_and_goes_on, args=arguments, nprocs=2)
    for rank in range(2):
        rows = [*map(json.loads, (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines())]
        assert [row["number"] for row in rows] == numbers
        assert all(row["difference"] <= row["bound"] for row in rows), rows
        assert all(len(row["phases"]) == 1 for row in rows), rows
        phases = {row["phases"][0] for row in rows}
        assert phases >= {"forward", "backward", "optimizer"}


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "point"), [(2, 40), (2, 250), (4, 120)])
def test_a_killed_rank_ends_all_others_with_a_message(
    tmp_path: Path, num_ranks: int, point: int
) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (num_ranks, str(tmp_path / "store"), str(tmp_path), point)
    processes = [
        context.Process(target=sharded_faults.loses_a_rank, args=(rank, *arguments))
        for rank in range(num_ranks)
    ]
    for each in processes:
        each.start()
    for each in processes:
        each.join(120)
    assert processes[-1].exitcode == -9
    for rank in range(num_ranks - 1):
        said = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert said["seconds"] < 60
        assert "Another rank has failed" in said["message"]


@pytest.mark.slow
def test_a_sharded_model_is_evaluated_between_steps_or_ends_on_all_ranks(tmp_path: Path) -> None:
    spawn(sharded_faults.evaluates, args=(2, str(tmp_path / "store"), str(tmp_path)), nprocs=2)
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [each["error"] for each in found] == ["OutOfMemoryAfterAllError", "OtherRankError"]
    assert all(each["differs"] == 0.0 and each["off"] <= 1e-12 for each in found), found
    assert all(each["seconds"] < 60 for each in found)


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _FailsOnce(torch.autograd.Function):
    """Fail in the first backward."""

    has_failed = False

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        if not _FailsOnce.has_failed:
            _FailsOnce.has_failed = True
            raise torch.OutOfMemoryError
        return gradient


class _CutBetween(nn.Module):
    """Fail between two layers, so that the gradients of the second are there by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.second(_FailsOnce.apply(self.first(value)))


def test_a_cut_backward_leaves_nothing_behind(alone: None) -> None:
    """Gradients of whole parameters that were not reduced yet are those of no later pass."""
    torch.manual_seed(0)
    model = _CutBetween()
    _FailsOnce.has_failed = True
    value = torch.ones(2, 3)
    model(value).sum().backward()
    wanted = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    fully_shard(model)
    passes = CutPasses(model)
    assert passes.can_be_put_back
    _FailsOnce.has_failed = False
    with pytest.raises(torch.OutOfMemoryError):
        model(value).sum().backward()
    passes.put_back()
    assert all(each.grad is None for each in model.parameters())
    model(value).sum().backward()
    found = {name: each.grad.full_tensor() for name, each in model.named_parameters()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_fails_before_the_first_pass_leaves_nothing_behind(alone: None) -> None:
    model = fully_shard(nn.Linear(3, 2))
    CutPasses(model).put_back()
    model._get_fsdp_state()._is_root = True  # as where the first pass was cut at its beginning
    CutPasses(model).put_back()
    model(torch.ones(1, 3)).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_a_model_that_stays_gathered_after_backward_trains_as_one_that_does_not(
    alone: None,
) -> None:
    """What is clipped and updated are the shards, and the next pass gathers the new ones."""
    ends = []
    for reshards in (True, False):

        def made(reshards: bool = reshards) -> nn.Module:
            torch.manual_seed(0)
            model: nn.Module = fully_shard(nn.Linear(3, 2))
            model.set_reshard_after_backward(reshards)
            return model

        job = Job(
            model=made,
            batch=lambda size: torch.ones(size, 3),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=2,
            clip_grad_norm=0.1,
        )
        with memfit.start(job, guard=False) as run:
            for _ in range(3):
                run.step(job.batch(2))
            run.model.reshard()
            ends.append([each.full_tensor() for each in run.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_a_model_that_is_whole_has_no_passes_to_put_back() -> None:
    passes = CutPasses(nn.Linear(2, 2))
    passes.settle()
    passes.put_back()
    assert not passes.can_be_put_back


def test_a_sharded_model_is_built_whole_for_what_is_proved(alone: None) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    make_whole(fully_shard(model))
    assert [type(each) for each in model.modules()] == [nn.Sequential, nn.Linear, nn.Linear]
    assert [each.shape for each in model.parameters()] == [(4, 3), (4,), (2, 4), (2,)]
    model(torch.ones(1, 3)).sum().backward()
    assert all(type(each.grad) is torch.Tensor for each in model.parameters())


def test_what_is_proved_of_a_sharded_model_does_not_reach_the_one_that_is_trained() -> None:
    def model() -> nn.Module:
        return nn.Linear(3, 4)

    job = Job(
        model=model,
        batch=lambda size: torch.ones(size, 3),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=torch.optim.SGD,
        batch_size=2,
    )
    living = model()
    whole = whole_job(job, living)
    found = LiveState({"model function": whole.model}).found()
    assert not [tensor for each in found for tensor, *_ in each.tensors]
    assert whole.model() is not living
    assert whole_job(replace(job, model=lambda: living), living).model() is living


def test_connections_between_ranks_are_found_and_ended() -> None:
    """Both ends are in this process, which plays both ranks; a third connection is left alone."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    other = socket.create_connection(listener.getsockname())
    store = dist.HashStore()
    found: dict[int, frozenset[int]] = {}

    def look(rank: int) -> None:
        found[rank] = between_ranks(store, "looked-for", rank, 2)

    ranks = [threading.Thread(target=look, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(20)
    numbers = {os.fstat(each.fileno()).st_ino for each in (near, far)}
    assert numbers <= found[0] == found[1]
    end(frozenset(numbers))
    near.settimeout(5)
    assert near.recv(1) == b""
    other.sendall(b"still there")
    for each in (listener, near, far, other):
        each.close()


class _Held:
    def __init__(self, group: object) -> None:
        self.group = group


@pytest.mark.slow
def test_groups_are_followed_by_others_wherever_they_are_held() -> None:
    old, new = _Held(None), _Held(None)
    held, listed = _Held(old), [old, 1]
    holders = GroupHolders({"0": old})
    holders.empty()
    assert (held.group, listed) == (None, [None, 1])
    holders.fill({"0": new})
    assert (held.group, listed) == (new, [new, 1])


def test_a_part_of_a_batch_is_read_back_to_where_kernels_round_alike() -> None:
    file = BatchFile()
    for start in range(5):
        part = torch.arange(40.0, dtype=torch.float64)[start:]
        loaded = file.load(file.store(part))
        assert torch.equal(loaded, part)
        assert loaded.data_ptr() % 64 == part.data_ptr() % 64
    file.close()
