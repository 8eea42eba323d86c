"""Walks from a job's objects to everything that its code can reach and change."""

from __future__ import annotations

import builtins
import collections
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from memfit.session.live_state import containers as kinds
from memfit.session.live_state.containers import Kind, NamesIn, SlotsOf
from memfit.session.live_state.findings import PLAIN_TYPES, Obstacle, Place
from memfit.session.live_state.generators import access_to
from memfit.session.live_state.harmless import is_harmless, is_made_in_python, obstacle_of
from memfit.session.live_state.named_globals import imported_modules, names_in
from memfit.session.live_state.ownership import (
    is_reporting,
    is_users_module,
    is_users_namespace,
    package_of,
)
from memfit.session.live_state.tensors import storages_of

_LEFT_OUT_PARTS = frozenset(("state",))


@dataclass(slots=True)
class Group:
    """All containers of one kind."""

    targets: list[Any] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


@dataclass(slots=True)
class Found:
    """What a walk has found."""

    groups: dict[Kind, Group] = field(default_factory=dict)
    tensors: list[tuple[torch.Tensor, Place, bool]] = field(default_factory=list)
    """With the place, and whether their content is to be kept."""
    arrays: list[tuple[Any, Place]] = field(default_factory=list)
    generators: list[tuple[Any, Place]] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scope:
    """What belongs to the state, and what does not."""

    own_packages: frozenset[str]
    left_out: frozenset[int]
    """Tensors whose content is kept elsewhere, by id."""
    left_out_storages: frozenset[int]
    gradients: bool = False

    @classmethod
    def of(cls, leave_out: Iterable[torch.Tensor], *, gradients: bool) -> Scope:
        """Leave out tensors, and all that share memory with them."""
        tensors = [*leave_out]
        ids, storages = frozenset(map(id, tensors)), frozenset(storages_of(tensors))
        return cls(frozenset(), ids, storages, gradients)


class Walk:
    """Walk once; every object is met once, at the first place where it is found."""

    def __init__(self, scope: Scope) -> None:
        self.found = Found()
        self._scope = scope
        self._seen: dict[int, Any] = {}
        self._waiting: collections.deque[tuple[object, Place]] = collections.deque()
        self._names: dict[int, tuple[dict[str, Any], set[str], Place]] = {}
        self._keys: dict[int, str] = {}

    def go(self, roots: Mapping[str, Any]) -> Found:
        """Walk from roots, by name."""
        self._waiting.extend((value, Place(name)) for name, value in roots.items())
        while self._waiting:
            value, place = self._waiting.popleft()
            kind: Any = type(value)
            if kind in PLAIN_TYPES or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            _handler_of(kind)(self, value, place)
        for namespace, names, place in self._names.values():
            self._hold(kinds.NAMES, NamesIn(tuple(sorted(names)), namespace), place)
        return self.found

    def _later(self, values: Iterable[tuple[Any, Place]]) -> None:
        self._waiting.extend(pair for pair in values if type(pair[0]) not in PLAIN_TYPES)

    def _hold(self, kind: Kind, target: Any, place: Place) -> None:
        group = self.found.groups.get(kind)
        if group is None:
            group = self.found.groups[kind] = Group()
        group.targets.append(target)
        group.places.append(place)

    def tensor(self, tensor: torch.Tensor, place: Place) -> None:
        """Meet a tensor."""
        scope = self._scope
        is_left_out = id(tensor) in scope.left_out or (
            bool(scope.left_out_storages) and bool(storages_of([tensor]) & scope.left_out_storages)
        )
        self._keys[id(tensor)] = place.text
        self.found.tensors.append((tensor, place, not is_left_out))
        self._namespace(tensor, place)
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            self._later([(hooks, Place(place.text, "hooks"))])
        if scope.gradients and tensor.is_leaf:
            self._later([(tensor.grad, Place(place.text, "grad"))])
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            self._later((getattr(tensor, name), place.attribute(name)) for name in names)

    def array(self, array: Any, place: Place) -> None:
        """Meet a numpy array."""
        self.found.arrays.append((array, place))
        if array.dtype.hasobject:
            self._later((each, place.item(at)) for at, each in enumerate(array.flat))

    def generator(self, generator: Any, place: Place) -> None:
        """Meet a generator of random numbers."""
        self.found.generators.append((generator, place))
        self._instance(generator, place)

    def mapping(self, kind: Kind, target: Any, place: Place) -> None:
        """Meet a dict."""
        self._hold(kind, target, place)
        for key, value in kind.copy(target).items():
            name = self._keys.get(id(key))
            at = place.item(key) if name is None else Place(place.owner, f"{place.name}[{name}]")
            self._later(((value, at), (key, at)))
        self._instance(target, place)

    def sequence(self, kind: Kind, target: Any, place: Place) -> None:
        """Meet a list, a deque or a set."""
        self._hold(kind, target, place)
        self._later((each, place.item(at)) for at, each in enumerate(kind.copy(target)))
        self._instance(target, place)

    def members(self, values: Iterable[Any], place: Place) -> None:
        """Meet something that cannot change itself, but holds others."""
        self._later((each, place.item(at)) for at, each in enumerate(values))

    def named_members(self, values: tuple[Any, ...], place: Place) -> None:
        """Meet a tuple, whose subclass may have attributes."""
        self.members(tuple.__iter__(values), place)
        self._instance(values, place)

    def cell(self, cell: types.CellType, place: Place) -> None:
        """Meet a closure variable."""
        self._hold(kinds.CELL, cell, place)
        self._later((value, place) for value in kinds.CELL.copy(cell))

    def function(self, function: types.FunctionType, place: Place) -> None:
        """Meet a function: its closure, its defaults, and the globals that its code names."""
        namespace = function.__globals__
        is_users = is_users_namespace(namespace, self._scope.own_packages)
        owner = Place(place.text)
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            at = owner.attribute(name)
            self._later([(cell, at)] if is_users else ((v, at) for v in kinds.CELL.copy(cell)))
        self._later(
            (part, owner.attribute(name))
            for name, part in (
                ("__defaults__", function.__defaults__),
                ("__kwdefaults__", function.__kwdefaults__),
            )
        )
        if package_of(function.__module__ or "") != "memfit":
            self._namespace(function, owner)
        if is_users:
            self._hold(kinds.FUNCTION, function, owner)
            self._globals(function, namespace)

    def _globals(self, function: types.FunctionType, namespace: dict[str, Any]) -> None:
        named, attributes, imported = names_in(function.__code__)
        self._watch_names(namespace, named)
        modules = [namespace[name] for name in named if name in namespace]
        modules += imported_modules(function.__code__, namespace)
        seen: set[int] = set()
        while modules:
            module = modules.pop()
            if not isinstance(module, types.ModuleType) or id(module) in seen:
                continue
            seen.add(id(module))
            inside = module.__dict__
            if is_users_namespace(inside, self._scope.own_packages):
                self._watch_names(inside, attributes | imported)
                modules += [inside[name] for name in attributes if name in inside]

    def _watch_names(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        place = Place(str(namespace.get("__name__", "a module")).removeprefix("memfit_job_"))
        _, watched, _ = self._names.setdefault(id(namespace), (namespace, set(), place))
        for name in names:
            if name in watched or (name not in namespace and name in _BUILTINS):
                continue
            watched.add(name)
            if name in namespace:
                self._later([(namespace[name], place.attribute(name))])

    def kind_of_object(self, kind: type, _place: Place) -> None:
        """Meet a class."""
        if not is_users_module(kind.__module__, self._scope.own_packages):
            return
        self._hold(kinds.CLASS, kind, Place(kind.__qualname__))
        for name, value in kinds.CLASS.copy(kind).items():
            self._later([(value, Place(kind.__qualname__, name))])
        self._later((base, Place(base.__qualname__)) for base in kind.__mro__[1:-1])

    def module(self, module: torch.nn.Module, place: Place) -> None:
        """Meet a torch module: its parts have the names that they have in ``named_modules``."""
        held = module.__dict__
        here = Place(place.text)
        for part in ("_parameters", "_buffers", "_modules"):
            named = held.get(part)
            if isinstance(named, dict) and id(named) not in self._seen:
                self._seen[id(named)] = named
                ordered = isinstance(named, collections.OrderedDict)
                kind = kinds.ORDERED_MEMBERS if ordered else kinds.MEMBERS
                self._hold(kind, named, here)
                self._later((value, here.attribute(name)) for name, value in named.items())
        self._instance(module, place)

    def optimizer(self, optimizer: torch.optim.Optimizer, place: Place) -> None:
        """Meet an optimizer."""
        self._instance(optimizer, place)

    def instance(self, instance: Any, place: Place) -> None:
        """Meet any other object."""
        kind = type(instance)
        if is_reporting(kind):
            return
        found = obstacle_of(instance, place)
        if found is not None:
            self.found.obstacles.append(found)
            return
        self._instance(instance, place)

    def _instance(self, instance: Any, place: Place) -> None:
        """Meet an object's attributes, its slots and its class."""
        self._namespace(instance, place)
        kind: Any = type(instance)
        if _can_change_class(kind):
            self._hold(kinds.CLASS_OF, instance, Place(place.text))
            self._hold(kinds.NAMESPACE_OF, instance, Place(place.text))
        for base in kind.__mro__:
            slots = _slots_of(base)
            if slots:
                target = SlotsOf(
                    tuple(name for name, _ in slots), tuple(s for _, s in slots), instance
                )
                here = Place(place.text)
                self._hold(kinds.SLOTS, target, here)
                self._later(
                    (value, here.attribute(name))
                    for name, value in zip(target.names, kinds.SLOTS.copy(target), strict=True)
                )
        self._later([(type(instance), place)])

    def _namespace(self, instance: Any, place: Place) -> None:
        """Meet what an object has in its ``__dict__``."""
        held = _dict_of(instance)
        if held is None or id(held) in self._seen:
            return
        self._seen[id(held)] = held
        here = Place(place.text)
        self._hold(kinds.NAMESPACE, held, here)
        self._later((value, here.attribute(name)) for name, value in held.items())

    def method(self, method: Any, place: Place) -> None:
        """Meet a bound method."""
        self._later(((method.__self__, Place(place.text)), (method.__func__, place)))

    def built_in(self, function: Any, place: Place) -> None:
        """Meet a function of Python's own, which may be an object's method."""
        owner = function.__self__
        if owner is not None and not isinstance(owner, types.ModuleType):
            self._later([(owner, Place(place.text))])

    def partial(self, partial: functools.partial[Any], place: Place) -> None:
        """Meet a function with some arguments given."""
        here = Place(place.text)
        self._later(
            (
                (partial.func, place),
                (partial.args, here.attribute("args")),
                (partial.keywords, here.attribute("keywords")),
            )
        )
        self._namespace(partial, place)

    def wrapper(self, wrapper: Any, place: Place) -> None:
        """Meet what wraps functions: a property, a static method, a cache."""
        for name in ("__func__", "fget", "fset", "fdel", "func", "__wrapped__"):
            self._later([(getattr(wrapper, name, None), place)])

    def reference(self, reference: Any, place: Place) -> None:
        """Meet a weak reference."""
        self._later([(weakref.ref.__call__(reference), place)])
        self._namespace(reference, place)

    def nothing(self, _value: Any, _place: Place) -> None:
        """Meet something that has no state."""


_BUILTINS = frozenset(dir(builtins))


def _dict_of(instance: Any) -> dict[str, Any] | None:
    try:
        held = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


@functools.cache
def _can_change_class(kind: Any) -> bool:
    """Say whether a class is an ordinary one, whose objects have a dict and can be asked for it."""
    return (
        "__dict__" in dir(kind)
        and kind.__getattribute__ is object.__getattribute__
        and is_made_in_python(kind)
    )


@functools.cache
def _slots_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """List a class's own slots."""
    if "__slots__" not in vars(kind):
        return ()
    return tuple(
        (name, value)
        for name, value in vars(kind).items()
        if isinstance(value, types.MemberDescriptorType)
    )


_Handler = Callable[[Walk, Any, Place], None]


def _with(kind: Kind, handler: Any) -> _Handler:
    return lambda walk, value, place: handler(walk, kind, value, place)


def _members_of(walk: Walk, value: Any, place: Place) -> None:
    walk.members(value, place)


_HANDLERS: tuple[tuple[Any, _Handler], ...] = (
    (torch.Tensor, Walk.tensor),
    (torch.nn.Module, Walk.module),
    (torch.optim.Optimizer, Walk.optimizer),
    (np.ndarray, Walk.array),
    (types.ModuleType, Walk.nothing),
    (type, Walk.kind_of_object),
    (types.FunctionType, Walk.function),
    (types.MethodType, Walk.method),
    ((types.BuiltinFunctionType, types.MethodWrapperType), Walk.built_in),
    (functools.partial, Walk.partial),
    (
        (
            property,
            staticmethod,
            classmethod,
            functools.cached_property,
            functools._lru_cache_wrapper,
        ),
        Walk.wrapper,
    ),
    (weakref.ref, Walk.reference),
    (types.CellType, Walk.cell),
    (collections.OrderedDict, _with(kinds.ORDERED_DICT, Walk.mapping)),
    (dict, _with(kinds.DICT, Walk.mapping)),
    (list, _with(kinds.LIST, Walk.sequence)),
    (collections.deque, _with(kinds.DEQUE, Walk.sequence)),
    (set, _with(kinds.SET, Walk.sequence)),
    (bytearray, _with(kinds.BYTES, Walk.sequence)),
    (tuple, Walk.named_members),
    ((frozenset, types.MappingProxyType), _members_of),
)


@functools.cache
def _handler_of(kind: type) -> _Handler:
    """Find out how objects of a type are met."""
    if is_harmless(kind):
        return Walk.nothing
    if package_of(kind.__module__) == "memfit" and not issubclass(
        kind, (torch.nn.Module, torch.optim.Optimizer)
    ):
        return Walk.nothing
    if access_to(kind) is not None:
        return Walk.generator
    return next((handler for base, handler in _HANDLERS if issubclass(kind, base)), Walk.instance)


def obstacles_in(found: Found) -> Iterator[Obstacle]:
    """Yield the obstacles, each once."""
    yield from dict.fromkeys(found.obstacles)
