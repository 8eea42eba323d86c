"""Parameters that ranks gather for a forward and give back behind it, as FSDP2 does.

Read from torch 2.13 (torch/distributed/fsdp/_fully_shard): a gathered parameter keeps its tensor
and its storage from step to step; giving it back makes the storage empty, without autograd's
counting it as a change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from memfit.trace.subclasses import known_parts_of


def has_shards(model: torch.nn.Module) -> bool:
    """Return whether parameters of a model are shards, be it of a single rank."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def storages_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of the storages that tensors have, of what wrappers hold too."""
    return {part.untyped_storage()._cdata for each in tensors for part in known_parts_of(each)}


class KeptGathered:
    """Keep parameters gathered from a forward until backward, where something reads them between.

    Args:
        model: whose modules ``fully_shard`` may have been applied to; for others nothing happens.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._groups = [*_groups_of(model)]
        self._before: list[tuple[Any, Any]] = []

    def keep(self, *tensors: torch.Tensor | None) -> bool:
        """Have the parameters whose memory these tensors share stay; return whether they do so."""
        wanted = {each.untyped_storage()._cdata for each in tensors if each is not None}
        found = [group for group in self._groups if wanted & _gathered_storages(group)]
        for group in found:
            if group.post_forward_mesh_info is not None:
                self._before.append((group, group.post_forward_mesh_info))
                group.post_forward_mesh_info = None
        return bool(found)

    def undo(self) -> None:
        """Have all parameters given back when they were before."""
        for group, before in self._before:
            group.post_forward_mesh_info = before
        self._before.clear()


def starts_backward(hook: Any) -> bool:
    """Return whether a hook on an output is the one with which a sharded module starts backward."""
    states: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    return states is not None and isinstance(getattr(hook, "__self__", None), states.FSDPState)


def _groups_of(model: torch.nn.Module) -> Iterator[Any]:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return
    modules: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    states = {id(state): state for state in (each._get_fsdp_state() for each in modules)}
    for state in states.values():
        yield from state._fsdp_param_groups


def _gathered_storages(group: Any) -> set[int]:
    gathered = (getattr(each, "_unsharded_param", None) for each in group.fsdp_params)
    return storages_of(each for each in gathered if each is not None)
