"""What the ranks of a group tell each other about a set that is split over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    import torch.distributed as dist

    Group: TypeAlias = "dist.ProcessGroup | RehearsedGroup"


@dataclass(frozen=True, slots=True)
class RehearsedGroup:
    """Stand for a group where a step is recorded or measured by one process alone.

    Memory is that of a rank; results are as if every rank had the same members.
    """

    num_ranks: int


def gathered(own: Tensor, group: Group) -> Tensor:
    """Give every rank's tensor, (ranks, ...); all have to be of one shape."""
    if isinstance(group, RehearsedGroup):
        found = own.new_empty((group.num_ranks, *own.shape))
        return found.copy_(own)
    found = own.new_empty((torch.distributed.get_world_size(group), *own.shape))
    torch.distributed.all_gather(list(found.unbind()), own, group=group)
    return found


def add_over_ranks(tensor: Tensor, group: Group) -> None:
    """Add up a tensor over the ranks, in place."""
    if not isinstance(group, RehearsedGroup):
        torch.distributed.all_reduce(tensor, group=group)


def counted_over_ranks(number: int, group: Group, device: torch.device) -> int:
    """Add up a number over the ranks."""
    if isinstance(group, RehearsedGroup):
        return number * group.num_ranks
    counted = torch.tensor(number, device=device)
    torch.distributed.all_reduce(counted, group=group)
    return int(counted)
