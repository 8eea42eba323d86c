"""Meets functions, methods and classes: what they keep, and the globals that their code names."""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Iterable
from typing import Any

from memfit.live_state import containers as kinds
from memfit.live_state.findings import Obstacle, Place
from memfit.live_state.named_globals import imported_modules, modules_by_name, names_in
from memfit.live_state.ownership import is_users_module, is_users_namespace, package_of
from memfit.live_state.reach import Reach

_BUILTINS = frozenset(dir(builtins))


class CodeWalk(Reach):
    """Meet what is called."""

    def cell(self, cell: types.CellType, place: Place) -> None:
        """Meet a closure variable."""
        self._hold(kinds.CELL, cell, place, (("", value, place) for value in kinds.CELL.copy(cell)))

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
            self.found.functions.append(function)
            self._hold(kinds.FUNCTION, function, owner)
            self.globals_of(function)

    def globals_of(self, function: types.FunctionType) -> None:
        """Meet the globals that a user's function names, in its own module and in others."""
        namespace = function.__globals__
        named, attributes, imported = names_in(function.__code__)
        self._watch_names(namespace, named)
        if "globals" in named:
            self.all_names(namespace)
        for found in modules_by_name(function) if self._follows_names else ():
            self.all_names(vars(found))
        modules = [namespace[name] for name in named if name in namespace]
        modules += imported_modules(function)
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

    def all_names(self, namespace: dict[str, Any]) -> None:
        """Meet everything in a module of the user's that code asks for by names made as it runs."""
        if is_users_namespace(namespace, self._scope.own_packages):
            self._whole.add(id(namespace))
            self._watch_names(namespace, kinds.ALL_NAMES.copy(namespace))

    def _watch_names(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        place = Place(str(namespace.get("__name__", "a module")).removeprefix("memfit_job_"))
        _, watched, _ = self._globals.setdefault(id(namespace), (namespace, set(), place))
        volatile: set[str] = set()
        for kind in (kinds.NAMES, kinds.ALL_NAMES):
            volatile.update(self._volatile.get((kind, id(namespace))) or ())
        for name in names:
            if name in watched or (name not in namespace and name in _BUILTINS):
                continue
            watched.add(name)
            if name in namespace and name not in volatile:
                self._later([(namespace[name], place.attribute(name))])

    def kind_of_object(self, kind: type, _place: Place) -> None:
        """Meet a class."""
        if not is_users_module(kind.__module__, self._scope.own_packages):
            return
        here = Place(kind.__qualname__)
        held = ((name, value, here.attribute(name)) for name, value in vars(kind).items())
        self._hold(kinds.CLASS, kind, here, held)
        self._later((base, Place(base.__qualname__)) for base in kind.__mro__[1:-1])

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
        if isinstance(wrapper, functools._lru_cache_wrapper) and self._is_users(wrapper):
            results = kinds.CACHE.copy(wrapper)
            self._hold(kinds.CACHE, wrapper, place, [("", each, place) for each in results])
            if results:
                sentence = (
                    f"{place.text} remembers results (functools.lru_cache): what a step has added "
                    "to them cannot be taken out again."
                )
                self.found.obstacles.append(Obstacle(place.owner, "cache", sentence))
        for name in ("__func__", "fget", "fset", "fdel", "func", "__wrapped__"):
            self._later([(getattr(wrapper, name, None), place)])

    def _is_users(self, function: Any) -> bool:
        return is_users_module(function.__module__ or "", self._scope.own_packages)

    def _namespace(self, instance: Any, place: Place) -> None:
        """Meet what an object has in its ``__dict__``."""
        raise NotImplementedError
