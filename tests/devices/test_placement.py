"""A placement counts ranks, and refuses numbers that do not go together."""

from __future__ import annotations

import pytest

import memfit
from memfit.errors import UsageError


def test_one_rank_on_one_device_is_the_special_case():
    placement = memfit.Placement()
    assert (placement.num_ranks, placement.rank, placement.local_rank) == (1, 0, 0)
    assert (placement.ranks_per_node, placement.num_nodes) == (1, 1)


def test_ranks_fill_one_node_after_the_other():
    placement = memfit.Placement(num_ranks=16, rank=13, devices_per_node=4)
    assert (placement.num_nodes, placement.node, placement.local_rank) == (4, 3, 1)


def test_a_node_has_eight_devices_unless_it_is_said():
    assert memfit.Placement(num_ranks=16).num_nodes == 2
    assert memfit.Placement(num_ranks=4, devices_per_node=8).ranks_per_node == 4


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_ranks": 4, "rank": 4}, "no rank 4 among 4 .* 0 to 3"),
        ({"num_ranks": 4, "rank": -1}, "no rank -1"),
        ({"num_ranks": 0}, "at least 1 rank, not 0"),
        ({"devices_per_node": 0}, "at least 1 device, not 0"),
        ({"num_ranks": 6, "devices_per_node": 4}, "6 ranks do not fill nodes of 4 .* have 2"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(numbers, message):
    with pytest.raises(UsageError, match=message):
        memfit.Placement(**numbers)
