"""Ranks that meet in every pass of a sharded model, and how they let each other go."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from memfit.runtime.guard.ranks import JoinedRanks
from memfit.runtime.shards.connections import between_ranks, end
from memfit.runtime.shards.group_holders import GroupHolders


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupFacts:
    """What a process group is made anew from."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    description: str


class ShardRanks(JoinedRanks):
    """Be one rank of those that share a model.

    Its groups are those of torch's default process group and of the meshes: all end together, and
    all are made anew with the same members, under the same names, where the old ones were held.
    """

    meets_in_update = True
    _connections: ClassVar[frozenset[int]] = frozenset()
    """Of the groups as they are, whichever of several runs has made them anew."""

    def __init__(self) -> None:
        super().__init__()
        self._facts: list[_GroupFacts] = []
        self._group_count = 0
        self._holders: GroupHolders | None = None
        ShardRanks._connections = self._look_for_connections()

    def note_training(self) -> None:
        """Note nothing: every pass uses these groups."""

    def leave_training(self, *, for_sure: bool = False) -> None:  # noqa: ARG002 - it always is
        """Leave all groups, which ends the others' wait in them."""
        if self.has_left:
            return
        self.has_left = True
        groups = _groups()
        self._group_count = dist.distributed_c10d._world.group_count
        self._facts = [_facts_of(name, group) for name, group in groups.items()]
        end(self._connections)
        self._leave()
        self._holders = GroupHolders(groups)
        self._holders.empty()
        groups.clear()
        gc.collect()

    def join_training(self) -> None:
        """Make all groups anew."""
        self.leave_training()
        self.has_left = False
        first, *others = self._facts
        self._join(first.timeout)
        world = dist.distributed_c10d._world
        made: dict[str, Any] = {first.name: dist.group.WORLD}
        made |= {facts.name: _made_anew(facts, self.rank) for facts in others}
        world.group_count = self._group_count  # the next group of the user's has a name of its own
        if (name := first.name) != str(made[name].group_name):
            register: Any = torch._C._distributed_c10d._register_process_group
            register(name, made[name])  # meshes look groups up by the name that they had
        assert self._holders is not None, "groups were left before"
        self._holders.fill(made)
        self._holders = None
        ShardRanks._connections = self._look_for_connections()

    def _look_for_connections(self) -> frozenset[int]:
        """Look for the connections of these groups, which are ended when they are left."""
        name = f"memfit-{self._number}-connections-{self._num_rejoined}"
        return between_ranks(self._store, name, self.rank, self.num_ranks)


def _groups() -> dict[str, Any]:
    """Return the groups that this process is a member of by name, the default one first."""
    default: Any = dist.group.WORLD
    others = [each for each in dist.distributed_c10d._world.pg_map if each is not default]
    # Every rank makes those that it has in the same order, so that nobody waits for another.
    return {each.group_name: each for each in (default, *sorted(others, key=_name_of))}


def _made_anew(facts: _GroupFacts, rank: int) -> Any:
    """Make a group under the name that it had, which ``torch.distributed.new_group`` chooses."""
    module: Any = dist.distributed_c10d
    group, _ = module._new_process_group_helper(
        len(facts.ranks),
        facts.ranks.index(rank),
        [*facts.ranks],
        dist.Backend(facts.backend),
        module._get_default_store(),
        facts.name,
        timeout=facts.timeout,
        group_desc=facts.description,
    )
    module._world.pg_group_ranks[group] = {each: at for at, each in enumerate(facts.ranks)}
    return group


def _name_of(group: Any) -> str:
    return str(group.group_name)


def _facts_of(name: str, group: Any) -> _GroupFacts:
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    return _GroupFacts(
        name=name,
        ranks=tuple(dist.get_process_group_ranks(group)),
        backend=dist.get_backend(group),
        timeout=group._get_backend(device).options._timeout,
        description=group.group_desc,
    )
