"""What a collective sends over the links of one rank, and how many ranks it is for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_NAMESPACES = ("c10d", "_c10d_functional")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective, as it concerns one rank."""

    sent_bytes: int
    """What the rank sends, as it receives as much, where ranks pass data on in a ring."""
    num_ranks: int
    num_nodes: int
    """How many machines the ranks are on."""


def exchange_of(func: Any, args: tuple[Any, ...]) -> Exchange | None:
    """Describe a call of an operator as a collective; None where it is none, or is for one rank.

    Sent bytes are those of a ring: of ``n`` ranks each sends ``(n - 1) / n`` of the gathered
    bytes, or of those to be scattered, and twice that of what is reduced to all
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    if getattr(func, "namespace", "") not in _NAMESPACES:
        return None
    rule = _RULES.get(str(func.overloadpacket).rpartition(".")[2])
    ranks = _ranks_of(args)
    if rule is None or len(ranks) < 2:
        return None
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or len(ranks)
    share = (len(ranks) - 1) / len(ranks)
    return Exchange(
        sent_bytes=int(share * rule(args, len(ranks))),
        num_ranks=len(ranks),
        num_nodes=len({rank // per_node for rank in ranks}),
    )


def _ranks_of(args: tuple[Any, ...]) -> list[int]:
    """Return the ranks of the group among an operator's arguments, which may be its name."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(each))
    named = [each for each in args if isinstance(each, str)]
    if not named:
        return []
    core: Any = dist.distributed_c10d
    group = core._resolve_process_group(named[-1])
    return dist.get_process_group_ranks(group)


def _first(args: tuple[Any, ...], _: int) -> int:
    return _num_bytes(args[0])


def _second(args: tuple[Any, ...], _: int) -> int:
    return _num_bytes(args[1])


def _twice_first(args: tuple[Any, ...], _: int) -> int:
    return 2 * _num_bytes(args[0])


def _first_of_all(args: tuple[Any, ...], num_ranks: int) -> int:
    return num_ranks * _num_bytes(args[0])


def _num_bytes(values: Any) -> int:
    return sum(each.numel() * each.element_size() for each in _tensors(values))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


_RULES: Mapping[str, Callable[[tuple[Any, ...], int], int]] = {
    "_allgather_base_": _first,
    "allgather_": _first,
    "allgather_into_tensor_coalesced_": _first,
    "all_gather_into_tensor": _first_of_all,
    "_reduce_scatter_base_": _second,
    "reduce_scatter_": _second,
    "reduce_scatter_tensor_coalesced_": _second,
    "reduce_scatter_tensor": _first,
    "allreduce_": _twice_first,
    "allreduce_coalesced_": _twice_first,
    "all_reduce": _twice_first,
    "all_reduce_coalesced": _twice_first,
    "broadcast_": _first,
    "alltoall_base_": _first,
    "alltoall_": _first,
    "all_to_all_single": _first,
}
"""By name of the operator: the bytes of which a ring sends the share of all ranks but one."""
