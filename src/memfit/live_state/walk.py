"""Walks from a job's objects to everything that its code can reach and change."""

from __future__ import annotations

import array
import collections
import functools
import os
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.job import Job
from memfit.live_state import containers as kinds
from memfit.live_state.containers import Kind, SlotsOf
from memfit.live_state.findings import Obstacle, Place
from memfit.live_state.generators import access_to
from memfit.live_state.harmless import is_harmless, is_made_in_python, obstacle_of
from memfit.live_state.ownership import is_reporting, not_followed, package_of
from memfit.live_state.reach import LARGE_BYTES, Found, Group, Scope, Volatile
from memfit.live_state.tensors import storages_of
from memfit.live_state.walk_code import CodeWalk


def walk(
    scope: Scope,
    roots: Mapping[str, Any],
    volatile: Volatile | None = None,
) -> Found:
    """Walk from roots, by name, to all that can be reached but what is volatile.

    What belongs to the process is reached from everywhere.
    """
    walking = Walk(scope, _handler_of, volatile)
    walking.process()
    return walking.go(roots)


def walk_on(scope: Scope, before: Found) -> Found:
    """Walk to what an earlier walk has postponed, as it is now."""
    return Walk(scope, _handler_of, None, before).go_on(before.postponed)


def walk_beyond(scope: Scope, roots: Mapping[str, Any], met: Mapping[int, Any]) -> Found:
    """Walk from roots to what an earlier walk has not met, by id."""
    return Walk(scope, _handler_of, None, Found(seen=dict(met))).go(roots)


def walk_behind(
    scope: Scope, made: object, modules: Iterable[types.ModuleType], met: dict[int, Any]
) -> Found:
    """Walk to what an object's classes and functions, and modules, lead to and was not met before.

    What the object itself holds is left out: it was made a moment ago, and nobody wants it back.
    """
    own = Walk(scope, _handler_of, None, Found(seen=met)).go({"": made})
    behind = Walk(scope, _handler_of, None, Found(seen=met))
    for module in modules:
        behind.all_names(vars(module))
    for function in own.functions:
        behind.globals_of(function)
    classes = own.groups.get(kinds.CLASS, Group()).targets
    lasting = [each for each in (*own.functions, *classes) if "<locals>" not in each.__qualname__]
    return behind.go({"": None, **{each.__qualname__: each for each in lasting}})


class Walk(CodeWalk):
    """Meet objects of all kinds."""

    def tensor(self, tensor: torch.Tensor, place: Place) -> None:
        """Meet a tensor."""
        self.found.names[id(tensor)] = place.text
        if id(tensor) in self._optimizers_states:
            return  # the caller keeps it, and nobody else knows it
        scope = self._scope
        is_kept = scope.copies_content and not (
            id(tensor) in scope.left_out
            or (scope.left_out_storages and storages_of([tensor]) & scope.left_out_storages)
        )
        self.found.tensors.append((tensor, place, is_kept))
        if isinstance(tensor, FakeTensor):
            return  # its attributes are those of the mode that made it
        self._namespace(tensor, place)
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            self._later([(hooks, Place(place.text, "hooks"))])
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            self._later((getattr(tensor, name), place.attribute(name)) for name in names)

    def array(self, array: Any, place: Place) -> None:
        """Meet a numpy array."""
        is_small = self._scope.copies_content or array.nbytes <= LARGE_BYTES
        if is_small and id(array) not in self._scope.left_out:
            self.found.arrays.append((array, place))
        if array.dtype.hasobject:
            self._later((each, place.item(at)) for at, each in enumerate(array.flat))

    def generator(self, generator: Any, place: Place) -> None:
        """Meet a generator of random numbers."""
        self.found.generators.append((generator, place))
        self._instance(generator, place)

    def mapping(self, kind: Kind, target: Any, place: Place) -> None:
        """Meet a dict."""
        self._hold(kind, target, place, self._entries(kind, target, place))
        self._of_subclass(target, place)

    def _entries(self, kind: Kind, target: Any, place: Place) -> Iterator[tuple[Any, Any, Place]]:
        numbered = "hook" in place.name  # by a count of all hooks there ever were
        for position, (key, value) in enumerate(kind.copy(target).items()):
            # Optimizers keep what belongs to a parameter under the parameter, or under its id.
            name = self.found.names.get(key if type(key) is int else id(key))
            at = place.item(position if numbered else key)
            at = at if name is None else Place(place.owner, f"{place.name}[{name}]")
            yield position, value, at
            yield position, key, at

    def sequence(self, kind: Kind, target: Any, place: Place) -> None:
        """Meet a list, a deque or a set."""
        values = enumerate(kind.copy(target))
        self._hold(kind, target, place, ((at, each, place.item(at)) for at, each in values))
        self._of_subclass(target, place)

    def _of_subclass(self, target: Any, place: Place) -> None:
        """Meet what a container has besides its content; Python's own have nothing."""
        if type(target).__module__ not in ("builtins", "collections"):
            self._instance(target, place)

    def members(self, values: Iterable[Any], place: Place) -> None:
        """Meet something that cannot change itself, but holds others."""
        self._later((each, place.item(at)) for at, each in enumerate(values))

    def named_members(self, values: tuple[Any, ...], place: Place) -> None:
        """Meet a tuple, whose subclass may have attributes."""
        self.members(tuple.__iter__(values), place)
        self._of_subclass(values, place)

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
                self._hold(kind, named, here, _attributes(named, here))
        self._instance(module, place)

    def optimizer(self, optimizer: torch.optim.Optimizer, place: Place) -> None:
        """Meet an optimizer: the states of tensors whose content is left out are left out too."""
        self.found.optimizers.append(optimizer)
        for parameter, state in getattr(optimizer, "state", {}).items():
            if id(parameter) in self._scope.left_out and isinstance(state, dict):
                tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
                self._optimizers_states.update(map(id, tensors))
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
            if not isinstance(instance, torch.nn.Module):  # nobody exchanges all that torch set up
                self._hold(kinds.NAMESPACE_OF, instance, Place(place.text))
        for base in kind.__mro__:
            slots = _slots_of(base)
            if slots:
                target = SlotsOf(
                    tuple(name for name, _ in slots), tuple(s for _, s in slots), instance
                )
                here = Place(place.text)
                held = dict(zip(target.names, kinds.SLOTS.copy(target), strict=True))
                self._hold(kinds.SLOTS, target, here, _attributes(held, here))
        self._later([(type(instance), place)])

    def _namespace(self, instance: Any, place: Place) -> None:
        """Meet what an object has in its ``__dict__``."""
        held = _dict_of(instance)
        if held is None or id(held) in self._seen:
            return
        self._seen[id(held)] = held
        here = Place(place.text)
        kind: Any = type(instance)
        left_out = not_followed(kind)
        self._hold(
            kinds.NAMESPACE,
            held,
            here,
            (each for each in _attributes(held, here) if each[0] not in left_out),
        )

    def process(self) -> None:
        """Meet torch's settings and, but on Windows, the environment."""
        if os.supports_bytes_environ:
            held: Any = os.environb
            self._hold(kinds.ENVIRONMENT, held._data, Place("os.environ"))
        self._hold(kinds.SETTINGS, torch, Place("torch"))

    def context(self, variable: ContextVar[Any], place: Place) -> None:
        """Meet a context variable; nothing takes the value away from one that had none."""
        (value,) = kinds.CONTEXT.copy(variable)
        if value is kinds.MISSING:
            text = f"{place.text} is a context variable without a value: it cannot be put back."
            self.found.obstacles.append(Obstacle(place.owner, "context variable", text))
            return
        self._hold(kinds.CONTEXT, variable, place, [("", value, place)])

    def reference(self, reference: Any, place: Place) -> None:
        """Meet a weak reference."""
        self._later([(weakref.ref.__call__(reference), place)])
        self._namespace(reference, place)

    def nothing(self, _value: Any, _place: Place) -> None:
        """Meet something that has no state."""


def _attributes(held: Mapping[str, Any], place: Place) -> Iterator[tuple[Any, Any, Place]]:
    return ((name, value, place.attribute(name)) for name, value in held.items())


def _dict_of(instance: Any) -> dict[str, Any] | None:
    try:
        held = object.__getattribute__(instance, "__dict__")
    except AttributeError:
        return None
    return held if type(held) is dict else None


@functools.cache
def _can_change_class(kind: Any) -> bool:
    """Tell if a class is an ordinary one, whose objects have a dict and can be asked for it."""
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
    (ContextVar, Walk.context),
    (collections.OrderedDict, _with(kinds.ORDERED_DICT, Walk.mapping)),
    (dict, _with(kinds.DICT, Walk.mapping)),
    (list, _with(kinds.LIST, Walk.sequence)),
    (collections.deque, _with(kinds.DEQUE, Walk.sequence)),
    (set, _with(kinds.SET, Walk.sequence)),
    (bytearray, _with(kinds.BYTES, Walk.sequence)),
    (array.array, _with(kinds.ARRAY, Walk.sequence)),
    (tuple, Walk.named_members),
    ((frozenset, types.MappingProxyType), _members_of),
)


def _is_followed(kind: type) -> bool:
    """Return whether a type of memfit holds what a step changes; others only watch the job's."""
    is_users = issubclass(kind, (torch.nn.Module, torch.optim.Optimizer, Job))
    return is_users or getattr(kind, "changes_with_steps", False)


@functools.cache
def _handler_of(kind: type) -> _Handler:
    """Find out how objects of a type are met."""
    if is_harmless(kind):
        return Walk.nothing
    if package_of(kind.__module__) == "memfit" and not _is_followed(kind):
        return Walk.nothing
    if access_to(kind) is not None:
        return Walk.generator
    return next((handler for base, handler in _HANDLERS if issubclass(kind, base)), Walk.instance)
