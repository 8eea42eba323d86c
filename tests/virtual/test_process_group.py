"""A job sees the world that it is predicted for, and nothing of it is left afterwards."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from memfit.devices.placement import Placement
from memfit.errors import UsageError
from memfit.virtual.process_group import current_placement, one_rank_of

FOUR = Placement(num_ranks=16, rank=13, devices_per_node=4)


def test_a_rank_sees_its_world_as_under_torchrun():
    with one_rank_of(FOUR):
        assert (dist.get_world_size(), dist.get_rank()) == (16, 13)
        names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        assert [os.environ[name] for name in names] == ["16", "13", "1", "4", "3"]
        assert current_placement() == FOUR


def test_nothing_is_left_of_it():
    before = dict(os.environ)
    functions = (dist.init_process_group, dist.new_group, dist.broadcast_object_list)
    with pytest.raises(KeyError), one_rank_of(FOUR):
        raise KeyError
    assert not dist.is_initialized()
    assert current_placement() is None
    assert dict(os.environ) == before
    assert functions == (dist.init_process_group, dist.new_group, dist.broadcast_object_list)


def test_a_script_opens_and_closes_the_group_that_is_open():
    with one_rank_of(FOUR):
        dist.init_process_group("nccl")
        dist.destroy_process_group()
        assert dist.get_world_size() == 16
        group = dist.new_group([12, 13], backend="gloo")
        assert dist.get_world_size(group) == 2


def test_every_rank_has_what_this_one_has():
    with one_rank_of(Placement(num_ranks=2, rank=1)):
        found: list[object] = [None, None]
        dist.all_gather_object(found, {"loss": 1.0})
        assert found == [{"loss": 1.0}, {"loss": 1.0}]
        dist.broadcast_object_list(found, src=0)
        dist.gather_object("mine", None, dst=0)
        mine: list[object] = [None]
        dist.scatter_object_list(mine, ["first", "second"], src=0)
        assert mine == ["second"]
        dist.gather_object("mine", found)
        assert found == ["mine", "mine"]


def test_without_a_placement_nothing_is_opened():
    with one_rank_of(None):
        assert not dist.is_initialized()


def test_a_group_that_is_open_is_left_to_its_owner():
    with (
        one_rank_of(Placement(num_ranks=3)),
        pytest.raises(UsageError, match=r"open already, of 3 rank"),
        one_rank_of(FOUR),
    ):
        pass
