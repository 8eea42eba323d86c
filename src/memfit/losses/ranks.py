"""What the ranks of a group tell each other about a set that is split over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed as dist

    Group: TypeAlias = "dist.ProcessGroup | AllRanks | RehearsedGroup"


@dataclass(frozen=True, slots=True)
class AllRanks:
    """Stand for torch's default process group, looked up whenever it is used.

    A group that is held on to does not outlive a guarded run's recovery, which makes it anew.
    """


@dataclass(frozen=True, slots=True)
class RehearsedGroup:
    """Stand for a group where a step is recorded or measured by one process alone.

    Memory is that of a rank; results are as if every rank had the same members.
    """

    num_ranks: int


def gathered(own: Tensor, group: Group) -> Tensor:
    """Return every rank's tensor, (ranks, ...); all have to be of one shape."""
    if isinstance(group, RehearsedGroup):
        found = own.new_empty((group.num_ranks, *own.shape))
        return found.copy_(own)
    members = _members(group)
    found = own.new_empty((torch.distributed.get_world_size(members), *own.shape))
    torch.distributed.all_gather(list(found.unbind()), own, group=members)
    return found


def add_over_ranks(tensor: Tensor, group: Group) -> None:
    """Add up a tensor over the ranks, in place."""
    if not isinstance(group, RehearsedGroup):
        torch.distributed.all_reduce(tensor, group=_members(group))


def counted_over_ranks(number: int, group: Group, device: torch.device) -> int:
    """Add up a number over the ranks."""
    if isinstance(group, RehearsedGroup):
        return number * group.num_ranks
    counted = torch.tensor(number, device=device)
    torch.distributed.all_reduce(counted, group=_members(group))
    return int(counted)


def _members(group: dist.ProcessGroup | AllRanks) -> dist.ProcessGroup | None:
    """Return what torch takes for a group; None is its default one."""
    return None if isinstance(group, AllRanks) else group
