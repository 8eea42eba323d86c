"""Looks again and again at the containers that a walk has found, and sees what is new in them.

Containers are copied by the built-in types' own methods. To see whether any of them holds another
object than before, the addresses of all that they hold are compared as one piece of memory, which
takes a microsecond where a comparison in Python takes hundreds.
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.hooks import RemovableHandle

from memfit.live_state.containers import BY_NAME, Kind, identity, names_of
from memfit.live_state.findings import PLAIN_TYPES, Place, is_plain
from memfit.live_state.reach import Found, Volatile

_ITEMS_AT = tuple.__basicsize__
"""Where in a tuple the addresses of what it holds begin (cpython/Include/cpython/tupleobject.h)."""
_ADDRESS_BYTES = ctypes.sizeof(ctypes.c_void_p)
_CAN_IDLE = (dict, collections.OrderedDict, list, set, collections.deque)

Slot = tuple[tuple[Kind, int], Any]
"""A container, and a name in it; None for the container as a whole."""


class Watch:
    """All containers of one walk.

    Args:
        found: by the walk.
        volatile: the names that it has left out.
    """

    def __init__(self, found: Found, volatile: Volatile) -> None:
        self._idle: list[Any] = []
        self._idle_hooks: list[Any] = []
        self._hooks_then = _hooks_now()
        self.idle: list[tuple[Kind, Any, Place, Any]] = []
        """Containers that were empty, with their copies."""
        self._groups: list[_Group] = []
        for kind, group in found.groups.items():
            busy = _Group(kind, volatile)
            for target, place in zip(group.targets, group.places, strict=True):
                if type(target) in _CAN_IDLE and not target:
                    (self._idle_hooks if "hook" in place.name else self._idle).append(target)
                    self.idle.append((kind, target, place, kind.copy(target)))
                else:
                    busy.targets.append(target)
                    busy.places.append(place)
            if busy.targets:
                self._groups.append(busy)
        self.copies = [group.begin() for group in self._groups]
        """Of the containers that were not empty, by kind."""

    def look(self) -> list[Slot] | None:
        """Copy the containers; return what holds other objects now; None if nothing does."""
        changed: list[Slot] = []
        if any(self._idle) or (_hooks_now() != self._hooks_then and any(self._idle_hooks)):
            changed += ((identity(each[0], each[1]), None) for each in self.idle if each[1])
        self._hooks_then = _hooks_now()
        self.copies = copies = []
        for group in self._groups:
            if group.is_steady and not group.has_moved():
                copies.append(group.copies)
                continue
            copies.append(group.copied())
            if group.kind.has_values:
                changed += group.changed()
        return changed or None

    def kept(self, copies: Sequence[Sequence[Any]]) -> Iterator[tuple[Kind, Any, Place, Any]]:
        """Yield every container with its kind, its place and one of its copies."""
        for group, of_group in zip(self._groups, copies, strict=True):
            for target, place, copy in zip(group.targets, group.places, of_group, strict=True):
                yield group.kind, target, place, copy
        yield from self.idle


_NUM_RESTORES = [0]


def note_restore() -> None:
    """Say that containers have been put back, hooks perhaps among them."""
    _NUM_RESTORES[0] += 1


def _hooks_now() -> tuple[int, int]:
    """Return what changes whenever a hook may have come.

    Every hook takes a number from one counter (torch/utils/hooks.py), so the many dicts that are
    there for hooks need not be looked at in every step.
    """
    return RemovableHandle.next_id, _NUM_RESTORES[0]


class _Group:
    """All containers of one kind that were not empty."""

    def __init__(self, kind: Kind, volatile: Volatile) -> None:
        self.kind = kind
        self.targets: list[Any] = []
        self.places: list[Place] = []
        self._volatile = volatile
        self._masked: list[tuple[int, frozenset[Any]]] = []
        self._mask: list[int] = []
        self.copies: list[Any] = []
        """The latest."""
        self.is_steady = kind.has_values
        """Whether equal contents of two moments show that no container was changed in between."""
        self._read: tuple[Any, ...] = ()
        self._lengths: list[int] = []
        self._held: tuple[Any, ...] = ()
        self._held_lengths: list[int] = []
        self._addresses = b""

    def begin(self) -> list[Any]:
        """Copy the containers for the first time."""
        for index, target in enumerate(self.targets):
            names = self._volatile.get(identity(self.kind, target))
            if names:
                self._masked.append((index, names))
                self.is_steady = False
        copies = self.copied()
        if self.kind.has_values:
            self._held = self._values()
            self._addresses = _addresses_in(self._held)
            self._held_lengths = [*map(len, copies)]
        if self.is_steady:
            self._read = self._read_all()
        return copies

    def has_moved(self) -> bool:
        """Return whether the containers hold other objects than they did when last asked."""
        before, self._read = self._read, self._read_all()
        return _addresses_in(self._read) != _addresses_in(before)

    def copied(self) -> list[Any]:
        """Copy the containers."""
        self.copies = [*map(self.kind.copy, self.targets)]
        return self.copies

    def _read_all(self) -> tuple[Any, ...]:
        """List all that the containers hold, without copying them."""
        each = (chain.from_iterable(map(reader, self.targets)) for reader in self.kind.readers)
        return tuple(chain.from_iterable(each))

    def changed(self) -> list[Slot]:
        """Return what holds other objects than at the last copies, apart from plain values."""
        held = self._values()
        addresses = _addresses_in(held)
        if addresses == self._addresses:
            return []
        found = [] if self._only_plain_differ(held, addresses) else [*self._new_in_each(held)]
        self._held_lengths = [*map(len, self.copies)]
        self._held, self._addresses = held, addresses
        return found

    def _values(self) -> tuple[Any, ...]:
        """List all that the copies hold, without what is volatile."""
        values = [*chain.from_iterable(map(self.kind.values, self.copies))]
        if self._masked:
            lengths = [*map(len, self.copies)]
            if lengths != self._lengths:
                self._lengths = lengths
                self._mask = [*self._masked_positions(lengths)]
            for position in self._mask:
                values[position] = None
        return tuple(values)

    def _masked_positions(self, lengths: Sequence[int]) -> Iterator[int]:
        starts = np.cumsum([0, *lengths]).tolist()
        for index, names in self._masked:
            target, copy = self.targets[index], self.copies[index]
            for position, name in enumerate(names_of(self.kind, target, copy)):
                if name in names:
                    yield starts[index] + position

    def _only_plain_differ(self, held: tuple[Any, ...], addresses: bytes) -> bool:
        if len(held) != len(self._held):
            return False
        old, new = (np.frombuffer(each, np.intp) for each in (self._addresses, addresses))
        return all(
            is_plain(self._held[position]) and is_plain(held[position])
            for position in np.flatnonzero(old != new).tolist()
        )

    def _new_in_each(self, held: tuple[Any, ...]) -> Iterator[Slot]:
        """Yield the containers, with names, that hold other objects than before."""
        lengths = [*map(len, self.copies)]
        old_start = new_start = 0
        for index, (target, copy) in enumerate(zip(self.targets, self.copies, strict=True)):
            old_end, new_end = old_start + self._held_lengths[index], new_start + lengths[index]
            old = _objects_in(self._held[old_start:old_end])
            now = held[new_start:new_end]
            new = _objects_in(now)
            old_start, new_start = old_end, new_end
            if old == new:
                continue
            key = identity(self.kind, target)
            names = names_of(self.kind, target, copy) if self.kind in BY_NAME else ()
            come = [name for name, value in zip(names, now, strict=False) if id(value) in new - old]
            yield from ((key, name) for name in come or [None])


def _objects_in(values: Sequence[Any]) -> set[int]:
    return {id(value) for value in values if type(value) not in PLAIN_TYPES}


def _addresses_in(held: tuple[Any, ...]) -> bytes:
    return ctypes.string_at(id(held) + _ITEMS_AT, _ADDRESS_BYTES * len(held))
