"""Reads what objects hold without running any code of theirs.

Types are asked of ``type``, attributes of C descriptors, lengths of the built-in types' own
methods: properties, ``__getattr__``, ``__eq__`` and ``__len__`` of a program are never called.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

_CO_NEWLOCALS = 0x2
_MOST_ITEMS = 256
"""Of a container that are looked at one by one; of longer ones a sample."""
_NUM_SAMPLED = 48
_type_dict: Any = type.__dict__["__dict__"].__get__
_type_mro: Any = type.__dict__["__mro__"].__get__
_module_dict: Any = _type_dict(types.ModuleType)["__dict__"].__get__
LruWrapper: Any = type(functools.lru_cache(lambda: None))


def lineage(kind: type) -> tuple[type, ...]:
    """Return the classes of a type, itself first, without asking its metaclass."""
    found: tuple[type, ...] = _type_mro(kind)
    return found


def class_attributes(kind: type) -> list[tuple[str, Any]]:
    """Return what a class itself defines."""
    return [(name, value) for name, value in _type_dict(kind).items() if type(name) is str]


def class_module(kind: type) -> str:
    """Return the name of the module that a class says it is from."""
    name = _type_dict(kind).get("__module__")
    return name if type(name) is str else ""


def module_namespace(module: types.ModuleType) -> dict[str, Any]:
    """Return the variables of a module; lazy modules are not woken."""
    namespace: dict[str, Any] = _module_dict(module)
    return namespace


class Attributes:
    """Read the attributes of instances of one type."""

    __slots__ = ("_dict", "_slots")

    def __init__(self, kind: type) -> None:
        self._dict: Any = None
        self._slots: list[tuple[str, Any]] = []
        for each in lineage(kind):
            namespace = _type_dict(each)
            reader = namespace.get("__dict__")
            if self._dict is None and type(reader) is types.GetSetDescriptorType:
                self._dict = reader
            if each.__flags__ & 1 << 9:  # a class made by a class statement
                self._slots += [
                    (name, member)
                    for name, member in namespace.items()
                    if type(member) is types.MemberDescriptorType
                ]

    @property
    def any(self) -> bool:
        """Return whether instances have attributes at all."""
        return self._dict is not None or bool(self._slots)

    def of(self, value: Any) -> list[tuple[Any, Any]]:
        """Return names and values."""
        found: list[tuple[Any, Any]] = []
        if self._dict is not None:
            namespace = self._dict.__get__(value)
            if type(namespace) is dict:
                found = list(namespace.items())
        for name, member in self._slots:
            try:
                found.append((name, member.__get__(value)))
            except AttributeError:
                continue  # a slot that was never set
        return found


def frame_variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    """Return the variables of a function's frame, and leave no reference to them behind.

    Before Python 3.13 reading ``f_locals`` stores a dict with the values in the frame, which would
    keep them alive; it is emptied again unless the program itself has asked for it.
    """
    if not frame.f_code.co_flags & _CO_NEWLOCALS:
        return []  # module level: the variables are the module's
    namespace = frame.f_locals
    found = list(namespace.items())
    # Held by the frame, by this variable and by the argument of getrefcount.
    if sys.version_info < (3, 13) and sys.getrefcount(namespace) <= 3:
        namespace.clear()
    return found


def list_items(value: list[Any]) -> tuple[list[tuple[Any, Any]], float]:
    """Return index and item of a list, or of a sample with how many each stands for."""
    length = list.__len__(value)
    if length <= _MOST_ITEMS:
        return list(enumerate(list.__iter__(value))), 1.0
    step = length // _NUM_SAMPLED
    indices = [*range(0, length - 1, step), length - 1]
    items = []
    for index in indices:
        try:
            items.append((index, list.__getitem__(value, index)))
        except IndexError:
            break  # another thread has shortened it
    return items, length / max(1, len(items))


def dict_items(value: dict[Any, Any]) -> tuple[list[tuple[Any, Any]], float]:
    """Return the items of a dict, or of its begin and its end with how many each stands for."""
    length = dict.__len__(value)
    if length <= _MOST_ITEMS:
        return list(dict.items(value)), 1.0
    half = _NUM_SAMPLED // 2
    try:
        keys = [*islice(dict.__iter__(value), half), *islice(dict.__reversed__(value), half)]
    except RuntimeError:
        return [], 1.0  # another thread is changing it
    view = zip(keys, _values(value, half), strict=False)
    return list(view), length / _NUM_SAMPLED


def _values(value: dict[Any, Any], half: int) -> list[Any]:
    view = dict.values(value)
    return [*islice(iter(view), half), *islice(reversed(view), half)]


def other_items(value: Any) -> tuple[list[Any], int, float]:
    """Return the items of a set or deque, their number, and how many each stands for."""
    reader: Any = next(each for each in (set, frozenset, deque) if isinstance_of(value, each))
    length = reader.__len__(value)
    try:
        items = list(islice(reader.__iter__(value), _MOST_ITEMS))
        if length > _MOST_ITEMS and reader is deque:
            items[-_NUM_SAMPLED:] = islice(deque.__reversed__(value), _NUM_SAMPLED)
    except RuntimeError:
        return [], length, 1.0  # another thread is changing it
    return items, length, length / max(1, len(items))


def isinstance_of(value: Any, kind: type) -> bool:
    """Return whether a value is of a type, whatever it claims in ``__class__``."""
    return kind in lineage(type(value))


def function_variables(function: types.FunctionType) -> Iterator[tuple[str, str, Any]]:
    """Yield style, name and value of what a function holds: closure, defaults, attributes."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield "closure", name, cell.cell_contents
        except ValueError:
            continue  # not yet set
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    if defaults:
        for name, value in zip(names[-len(defaults) :], defaults, strict=False):
            yield "default", name, value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield "default", name, value
    for name, value in function.__dict__.items():
        yield "attribute", name, value
