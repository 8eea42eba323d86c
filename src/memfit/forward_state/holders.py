"""What code can reach that holds something else, looked at quickly before and after it runs."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import is_
from typing import Any, NamedTuple

import torch

from memfit.live_state import containers as kinds
from memfit.live_state.containers import Kind, differences
from memfit.live_state.findings import PLAIN_TYPES, Change, Obstacle, Place
from memfit.live_state.harmless import is_harmless
from memfit.live_state.reach import Found, Scope
from memfit.live_state.walk import walk, walk_beyond

_NUM_STANDARD = len(vars(torch.nn.Module()))
_STANDARD = tuple(vars(torch.nn.Module()))
_MEMBERS = ("_parameters", "_buffers", "_modules")
_HOOKS = tuple(
    name
    for name, value in vars(torch.nn.Module()).items()
    if isinstance(value, (dict, set)) and name not in _MEMBERS
)
_NOT_WATCHED = (kinds.FUNCTION, kinds.CLASS_OF, kinds.NAMESPACE_OF)
"""Defaults and code of functions, and which class an object is of."""
_NAMED_ONCE = (kinds.NAMESPACE, kinds.MEMBERS, kinds.ORDERED_MEMBERS)
"""Where a value that stays is not expected to get another name."""


class Held(NamedTuple):
    """What containers held at one moment."""

    copies: Sequence[list[Any]]
    """By group, as ``Holders`` lists them."""
    added: Sequence[tuple[Kind, Any, Any]]
    """Containers that were not there when ``Holders`` was made: kind, container, copy."""
    tensors: Sequence[torch.Tensor]
    arrays: Sequence[Any]
    generators: Sequence[Any]
    found: Sequence[Found]
    hooks: Sequence[tuple[dict[Any, Any], dict[Any, Any]]]
    """Hooks of modules that had none when ``Holders`` was made, with copies."""

    def named_tensors(self) -> Iterator[tuple[torch.Tensor, Place]]:
        """Yield the tensors with their places."""
        for found in self.found:
            yield from ((tensor, place) for tensor, place, _ in found.tensors)


class _Group(NamedTuple):
    """Containers of one kind."""

    kind: Kind
    targets: Sequence[Any]
    places: Sequence[Place]
    is_torchs: bool
    """Whether they belong to torch's own layers, to which user code gives no new objects."""

    def copies(self) -> list[Any]:
        """Copy the containers, not what they hold."""
        return [*map(self.kind.copy, self.targets)]

    def values(self, copies: Iterable[Any]) -> Iterator[Any]:
        """List what copies hold, one after the other."""
        return chain.from_iterable(map(self.kind.values, copies))

    def are_same(self, some: Sequence[Any], others: Sequence[Any]) -> bool:
        """Return whether copies hold the same objects under the same names.

        Torch's own layers hold numbers, parameters and buffers, which may be asked if they are
        equal; it is quicker.
        """
        if self.is_torchs:
            try:
                return some == others
            except (RuntimeError, ValueError):  # a tensor in the place of another one
                return False
        if [*map(len, some)] != [*map(len, others)]:
            return False
        if not all(map(is_, self.values(some), self.values(others))):
            return False
        if self.kind in _NAMED_ONCE or not isinstance(some[0], dict):
            return True
        return all(map(is_, chain.from_iterable(some), chain.from_iterable(others)))


class Holders:
    """Find everything once; then copy what it holds, again and again.

    Args:
        roots: where to begin, by name.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._found = walk(Scope.of(()), roots)
        met = self._found.seen.items()
        self._met = {key: value for key, value in met if not isinstance(value, torch.Tensor)}
        self._groups = [*_groups(self._found)]
        self._without_hooks = [
            hooks
            for held in _targets(self._found, kinds.NAMESPACE)
            if _is_of_module(held)
            for hooks in (held["_forward_hooks"], held["_forward_pre_hooks"])
            if not hooks
        ]
        self.tensors = [tensor for tensor, _, _ in self._found.tensors]
        self._arrays = [array for array, _ in self._found.arrays]
        self._generators = [generator for generator, _ in self._found.generators]
        self._known = frozenset(self._met) | frozenset(map(id, self.tensors))
        self._usual: list[list[Any]] = [[] for _ in self._groups]
        """What was held when nothing had come; its objects are kept, so that they stay known."""
        self._expected: weakref.ref[Any] | None = None

    def expect(self, value: Any) -> None:
        """Do not look into an object that comes after the walk and leads only to what is known."""
        self._expected = weakref.ref(value)

    @property
    def has_new_hooks(self) -> bool:
        """Return whether modules that had no hooks around their forward have some now."""
        return any(self._without_hooks)

    @property
    def obstacles(self) -> Sequence[Obstacle]:
        """List what cannot be put back."""
        return self._found.obstacles

    def held(self, arguments: Sequence[Any] = ()) -> Held:
        """Copy what the containers hold now, and those among the arguments of a call."""
        copies = [group.copies() for group in self._groups]
        fresh = [value for value in arguments if not _is_plain_argument(value)]
        for number, group in enumerate(self._groups):
            usual = self._usual[number]
            if group.is_torchs or (usual and group.are_same(copies[number], usual)):
                continue
            came = self._came(group, copies[number])
            if not came:
                self._usual[number] = copies[number]
            fresh += came
        if fresh:
            return self._with_fresh(copies, fresh)
        found = (self._found,)
        hooks = self._new_hooks()
        return Held(copies, (), self.tensors, self._arrays, self._generators, found, hooks)

    def _new_hooks(self) -> Sequence[tuple[dict[Any, Any], dict[Any, Any]]]:
        if not self.has_new_hooks:
            return ()
        return [(hooks, dict(hooks)) for hooks in self._without_hooks if hooks]

    def put_back(self, then: Held, now: Held | None = None) -> None:
        """Have the containers hold what they held then.

        Args:
            then: what is wanted.
            now: what they hold now, if that is known.
        """
        for number, group in enumerate(self._groups):
            wanted = then.copies[number]
            copies = group.copies() if now is None else now.copies[number]
            if group.are_same(copies, wanted):
                continue
            for target, old, new in zip(group.targets, wanted, copies, strict=True):
                if not group.are_same([old], [new]):
                    group.kind.put(target, old)
        for kind, target, copy in then.added:
            kind.put(target, copy)
        if then.hooks or self.has_new_hooks:
            wanted_hooks = {id(hooks): copy for hooks, copy in then.hooks}
            for hooks in self._without_hooks:
                hooks.clear()
                hooks.update(wanted_hooks.get(id(hooks), {}))

    def pairs(self, then: Held, now: Held) -> Iterator[tuple[_Group, list[Any], list[Any]]]:
        """Yield the groups whose containers hold otherwise now, with their copies."""
        for group, old, new in zip(self._groups, then.copies, now.copies, strict=True):
            if not group.are_same(new, old):
                yield group, old, new

    def changes(self, then: Held) -> Iterator[Change]:
        """Yield what the containers hold otherwise now."""
        for group, wanted, copies in self.pairs(then, self.held()):
            for target, old, new, place in zip(
                group.targets, wanted, copies, group.places, strict=True
            ):
                if not group.are_same([old], [new]):
                    yield from differences(group.kind, target, old, place)
        for kind, target, copy in then.added:
            yield from differences(kind, target, copy, Place("an argument"))

    def _came(self, group: _Group, copies: Sequence[Any]) -> list[Any]:
        """List what containers hold that was not there when they were found."""
        expected = None if self._expected is None else self._expected()
        return [
            value
            for value in group.values(copies)
            if id(value) not in self._known and value is not expected and _has_state(value)
        ]

    def _with_fresh(self, copies: list[list[Any]], fresh: list[Any]) -> Held:
        """Look at what has come since the walk; it is not kept, as it may go again."""
        found = walk_beyond(Scope.of(()), {"": fresh}, self._met)
        added = [
            (kind, target, kind.copy(target))
            for kind, group in found.groups.items()
            for target in group.targets
            if kind not in _NOT_WATCHED and target is not fresh
        ]
        return Held(
            copies,
            added,
            [*self.tensors, *(tensor for tensor, _, _ in found.tensors)],
            [*self._arrays, *(array for array, _ in found.arrays)],
            [*self._generators, *(generator for generator, _ in found.generators)],
            (self._found, found),
            self._new_hooks(),
        )


def _has_state(value: Any) -> bool:
    kind: Any = type(value)
    return not is_harmless(kind)


def _is_plain_argument(value: Any) -> bool:
    """Return whether an argument is no container that a callee could change."""
    if isinstance(value, torch.Tensor) or type(value) in PLAIN_TYPES:
        return True
    return isinstance(value, tuple) and all(map(_is_plain_argument, value))


def _groups(found: Found) -> Iterator[_Group]:
    """Part containers by kind, and leave out what never changes."""
    empty, torchs = _empty_standard(found), _of_torchs_layers(found)
    for kind, group in found.groups.items():
        if kind in _NOT_WATCHED:
            continue
        for is_torchs in (True, False):
            pairs = [
                pair
                for pair in zip(group.targets, group.places, strict=True)
                if id(pair[0]) not in empty and (id(pair[0]) in torchs) == is_torchs
            ]
            if pairs:
                targets, places = zip(*pairs, strict=True)
                yield _Group(kind, targets, places, is_torchs)


def _of_torchs_layers(found: Found) -> set[int]:
    """List the namespaces of layers of torch's own classes without hooks, by id."""
    inside: set[int] = set()
    for module in [*found.seen.values()]:
        if not isinstance(module, torch.nn.Module):
            continue
        held = vars(module)
        is_torchs = type(module).__module__.startswith("torch.nn.modules.")
        if is_torchs and not any(held[name] for name in _HOOKS if "state_dict" not in name):
            inside |= {id(held), *(id(held[name]) for name in _MEMBERS)}
    return inside


def _targets(found: Found, kind: Kind) -> Sequence[Any]:
    group = found.groups.get(kind)
    return () if group is None else group.targets


def _is_of_module(held: dict[str, Any]) -> bool:
    """Return whether a namespace begins with what torch gives every module."""
    return tuple(islice(held, _NUM_STANDARD)) == _STANDARD


def _empty_standard(found: Found) -> set[int]:
    """List what is empty because torch makes it for every module, by id."""
    empty: set[int] = set()
    for held in _targets(found, kinds.NAMESPACE):
        if _is_of_module(held):
            empty.update(id(held[name]) for name in _HOOKS if not held[name])
    for target in _targets(found, kinds.ORDERED_DICT):
        if type(target) is collections.OrderedDict and not target.__dict__:
            empty.add(id(target.__dict__))
    for tensor, _, _ in found.tensors:
        if not vars(tensor):
            empty.add(id(vars(tensor)))
    return empty
