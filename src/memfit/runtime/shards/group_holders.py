"""Finds who holds process groups, so that these can end and be followed by others.

A gloo group closes its connections when nothing holds it any more; only then do ranks stop to wait
for one that has left. ``abort`` and ``shutdown`` of torch 2.13 do not end that wait. What holds
groups besides torch's own registries are meshes, FSDP2's mesh descriptions and code that has kept
them: Python's garbage collector knows all of these but tuples' owners and extensions.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

_Put = Callable[[Any], None]


class GroupHolders:
    """Take process groups out of everything that holds them, and give it their successors.

    Args:
        groups: by a name of the caller's; torch has forgotten them already.
    """

    def __init__(self, groups: Mapping[str, Any]) -> None:
        self._puts: list[tuple[str, _Put]] = []
        gc.collect()
        # Dicts that hold nothing but groups by name are unknown to the garbage collector.
        meshes = [each for each in gc.get_objects() if type(each) is DeviceMesh]
        registries = [mesh._pg_registry for mesh in meshes if hasattr(mesh, "_pg_registry")]
        for name, group in groups.items():
            holders = [*gc.get_referrers(group), *registries]
            for holder in {id(each): each for each in holders}.values():
                if holder is not groups and not isinstance(holder, types.FrameType):
                    self._puts += [(name, put) for put in _places_in(holder, group)]

    def empty(self) -> None:
        """Take the groups out."""
        for _, put in self._puts:
            put(None)

    def fill(self, groups: Mapping[str, Any]) -> None:
        """Put the successors in, by the same names."""
        for name, put in self._puts:
            put(groups[name])


def _places_in(holder: Any, group: Any) -> Iterator[_Put]:
    """Yield functions that set the places of a holder where a group lies."""
    if isinstance(holder, types.CellType):
        yield _cell_setter(holder)
    elif isinstance(holder, list):
        yield from (_item_setter(holder, at) for at, each in enumerate(holder) if each is group)
    elif isinstance(holder, dict):
        yield from (_item_setter(holder, key) for key, each in holder.items() if each is group)
    elif isinstance(held := getattr(holder, "__dict__", None), dict):
        yield from (_item_setter(held, key) for key, each in held.items() if each is group)


def _cell_setter(cell: types.CellType) -> _Put:
    def put(value: Any) -> None:
        cell.cell_contents = value

    return put


def _item_setter(holder: Any, key: Any) -> _Put:
    def put(value: Any) -> None:
        holder[key] = value

    return put
