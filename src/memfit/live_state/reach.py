"""What a walk has found, and how it goes from one object to the next."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from memfit.live_state import containers as kinds
from memfit.live_state.containers import Kind, NamesIn, identity
from memfit.live_state.findings import PLAIN_TYPES, Obstacle, Place
from memfit.live_state.tensors import storages_of
from memfit.units import MIB

LARGE_BYTES = 16 * MIB
"""What is larger and holds data is taken to stay as it is while nothing is computed for real."""

Volatile = Mapping[tuple[Kind, int], frozenset[Any] | None]
"""Names, per container, that mean other objects again and again; None stands for all."""

_BUILDERS = frozenset(("model function", "optimizer function", "batch function"))
"""Roots that are done when a step begins: what they asked for by name shows in what they made."""


@dataclass(slots=True)
class Group:
    """All containers of one kind."""

    targets: list[Any] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Postponed:
    """A part of a container that is walked anew every time."""

    kind: Kind
    target: Any
    place: Place
    names: frozenset[Any] | None
    """None for all, in which case the container itself is looked at anew too."""


@dataclass(slots=True)
class Found:
    """What a walk has found."""

    groups: dict[Kind, Group] = field(default_factory=dict)
    tensors: list[tuple[torch.Tensor, Place, bool]] = field(default_factory=list)
    """With the place, and whether their content is to be kept."""
    arrays: list[tuple[Any, Place]] = field(default_factory=list)
    generators: list[tuple[Any, Place]] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)
    functions: list[FunctionType] = field(default_factory=list)
    """Of the user."""
    postponed: list[Postponed] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)
    """Everything met, by id, which keeps it alive."""
    names: dict[int, str] = field(default_factory=dict)
    """What tensors are called, by id."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What belongs to the state, and what does not."""

    own_packages: frozenset[str]
    left_out: frozenset[int]
    """Tensors whose content is kept elsewhere, by id."""
    left_out_storages: frozenset[int]
    copies_content: bool = True
    """Whether the content of tensors is kept at all, and that of large arrays."""

    @classmethod
    def of(cls, leave_out: Iterable[Any]) -> Scope:
        """Leave out arrays, tensors, and all tensors that share memory with them."""
        left_out = [*leave_out]
        tensors = [each for each in left_out if isinstance(each, torch.Tensor)]
        ids, storages = frozenset(map(id, left_out)), frozenset(storages_of(tensors))
        return cls(frozenset(), ids, storages)


class Reach:
    """Meet every object once, at the first place where it is found.

    Args:
        scope: what belongs to the state.
        handler_of: tells how objects of a type are met.
        volatile: what is left to a later walk.
        before: what an earlier walk has found, which is not met again.
    """

    def __init__(
        self,
        scope: Scope,
        handler_of: Callable[[Any], Callable[[Any, Any, Place], None]],
        volatile: Volatile | None = None,
        before: Found | None = None,
    ) -> None:
        self.found = Found() if before is None else Found(names=before.names)
        self._handler_of = handler_of
        self._scope = scope
        self._volatile = volatile or {}
        self._seen = self.found.seen
        self._seen_before: Mapping[int, Any] = {} if before is None else before.seen
        self._waiting: collections.deque[tuple[object, Place]] = collections.deque()
        self._globals: dict[int, tuple[dict[str, Any], set[str], Place]] = {}
        self._follows_names = True
        self._whole: set[int] = set()
        """The globals, by id, that are looked at whatever their names."""
        self._optimizers_states: set[int] = set()

    def go(self, roots: Mapping[str, Any]) -> Found:
        """Walk from roots, by name; what several lead to is named after the first."""
        for name, value in roots.items():
            self._follows_names = name not in _BUILDERS
            self._later([(value, Place(name))])
            self._meet_all()
        return self._finished()

    def go_on(self, postponed: Iterable[Postponed]) -> Found:
        """Walk what an earlier walk has postponed."""
        for part in postponed:
            if part.names is None:
                self._add(part.kind, part.target, part.place)
            self._later(
                (value, kinds.at(part.kind, part.place, name))
                for name, value in part.kind.named(part.target, part.kind.copy(part.target))
                if part.names is None or name in part.names
            )
        self._meet_all()
        return self._finished()

    def _meet_all(self) -> None:
        handler_of, seen, before = self._handler_of, self._seen, self._seen_before
        while self._waiting:
            value, place = self._waiting.popleft()
            if id(value) not in seen and id(value) not in before:
                seen[id(value)] = value
                handler_of(type(value))(self, value, place)

    def _finished(self) -> Found:
        for key, (namespace, names, place) in self._globals.items():
            if key in self._whole:
                self._hold(kinds.ALL_NAMES, namespace, place)
            else:
                self._hold(kinds.NAMES, NamesIn(tuple(sorted(names)), namespace), place)
        return self.found

    def _later(self, values: Iterable[tuple[Any, Place]]) -> None:
        """Meet some objects later."""
        self._waiting.extend(pair for pair in values if type(pair[0]) not in PLAIN_TYPES)

    def _add(self, kind: Kind, target: Any, place: Place) -> None:
        group = self.found.groups.get(kind)
        if group is None:
            group = self.found.groups[kind] = Group()
        group.targets.append(target)
        group.places.append(place)

    def _hold(
        self,
        kind: Kind,
        target: Any,
        place: Place,
        held: Iterable[tuple[Any, Any, Place]] = (),
    ) -> None:
        """Meet a container, and later what it holds: names, values and places."""
        names = self._volatile.get(identity(kind, target), frozenset()) if self._volatile else ()
        if names is None:
            self.found.postponed.append(Postponed(kind, target, place, None))
            return
        self._add(kind, target, place)
        if names:
            self.found.postponed.append(Postponed(kind, target, place, frozenset(names)))
        self._later((value, at) for name, value, at in held if name not in names)
