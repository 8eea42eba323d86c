"""How each kind of container is copied, put back and compared.

All goes through the methods of the built-in types: a subclass may have others of its own, which may
do anything.
"""

from __future__ import annotations

import array
import gc
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, is_
from types import CellType, FunctionType, ModuleType
from typing import Any, Final

import torch

from memfit.live_state.findings import (
    Change,
    ChangeKind,
    Place,
    is_plain,
    is_same,
    short,
)

_LINK = "_lru_list_elem"
"""The type of the links between what a bounded cache remembers."""


class _Missing:
    """Stand for a name that has no value."""

    def __repr__(self) -> str:
        return "nothing"


MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of container: what ``copy`` gives, ``put`` takes and ``differences`` compares."""

    name: str
    copy: Callable[[Any], Any]
    """Copies a container, not what it holds."""
    values: Callable[[Any], Iterable[Any]]
    """Lists what a copy holds, always in the same order."""
    put: Callable[[Any, Any], None]
    """Makes a container hold what a copy holds."""
    named: Callable[[Any, Any], Iterable[tuple[Any, Any]]]
    """Lists the names and values of a copy of a container, names being keys, positions …"""
    readers: tuple[Callable[[Any], Iterable[Any]], ...] = ()
    """What lists all that a container holds, its keys too, without copying it."""
    is_namespace: bool = False
    """Whether names are names of attributes, each of which is told of."""

    @property
    def has_values(self) -> bool:
        """Return whether it holds objects that are met by way of it."""
        return self.values is not _nothing


def is_as_copied(kind: Kind, target: Any, copy: Any) -> bool:
    """Return whether a container holds the very objects that it held, in the same order."""
    now = kind.copy(target)
    if not kind.has_values:
        return now is copy
    if len(now) != len(copy) or not all(map(is_, kind.values(now), kind.values(copy))):
        return False
    return not isinstance(now, dict) or all(map(is_, now, copy))


def differences(kind: Kind, target: Any, old: Any, place: Place) -> Iterator[Change]:
    """Yield what a container holds now that it did not hold when it was copied, or the reverse."""
    if is_as_copied(kind, target, old):
        return
    new = kind.copy(target)
    before, after = dict(_keyed(kind, target, old)), dict(_keyed(kind, target, new))
    changed = [
        (before.get(key, MISSING), after.get(key, MISSING), key)
        for key in dict.fromkeys((*before, *after))
    ]
    changed = [each for each in changed if not is_same(_value(each[0]), _value(each[1]))]
    if kind.is_namespace:
        for was, now, _ in changed:
            name = (now if was is MISSING else was)[0]
            yield _told(at(kind, place, name), _value(was), _value(now))
    elif changed:
        is_hook = "hook" in place.name
        yield Change(
            *place,
            kind=ChangeKind.HOOK if is_hook else ChangeKind.CONTAINER,
            detail=_told_in_container(before, after, changed),
            evidence=_evidence(changed),
        )
    elif kind is ORDERED_DICT and [*map(id, old)] != [*map(id, new)]:
        yield Change(*place, kind=ChangeKind.CONTAINER, detail="its order changed")


def _keyed(kind: Kind, target: Any, copy: Any) -> Iterator[tuple[Any, tuple[Any, Any]]]:
    """Yield names and values under keys that can be compared without asking objects."""
    for name, value in kind.named(target, copy):
        yield (name if is_plain(name) else id(name)), (name, value)


def _value(entry: Any) -> Any:
    return MISSING if entry is MISSING else entry[1]


def at(kind: Kind, place: Place, name: Any) -> Place:
    """Return the place of what a container that lies somewhere holds under a name."""
    if kind in _NAMELESS:
        return place
    return place.attribute(name) if kind.is_namespace else place.item(name)


def _told(place: Place, was: Any, now: Any) -> Change:
    plain = all(value is MISSING or is_plain(value) for value in (was, now))
    kind = ChangeKind.ATTRIBUTE if plain else ChangeKind.BINDING
    evidence = repr((was, now)) if plain else ""
    return Change(*place, kind=kind, detail=_was_and_is(was, now), evidence=evidence)


_MOST_EVIDENCE = 1000


def _evidence(changed: Sequence[Any]) -> str:
    """Write all that changed in a container, where all of it is plain."""
    if len(changed) > _MOST_EVIDENCE:
        return ""
    entries = [entry for was, now, _ in changed for entry in (was, now)]
    plain = all(entry is MISSING or all(map(is_plain, entry)) for entry in entries)
    return repr(entries) if plain else ""


def _was_and_is(was: Any, now: Any) -> str:
    if was is MISSING:
        return f"came, as {short(now)}"
    if now is MISSING:
        return "went"
    if not is_plain(was) and type(was) is type(now):
        return f"is another {type(now).__name__}"
    return f"was {short(was)}, is {short(now)}"


def _told_in_container(
    before: Mapping[Any, Any], after: Mapping[Any, Any], changed: Sequence[Any]
) -> str:
    if len(before) != len(after):
        return f"held {len(before)}, holds {len(after)}"
    was, now, _ = changed[0]
    if len(changed) == 1 and MISSING not in (was, now):
        return f"{short(was[0])} {_was_and_is(_value(was), _value(now))}"
    return f"{len(changed)} of {len(before)} entries changed"


def _put_dict(target: Any, copy: dict[Any, Any]) -> None:
    dict.clear(target)
    dict.update(target, copy)


def _copy_ordered(target: Any) -> dict[Any, Any]:
    return dict(OrderedDict.items(target))


def _put_ordered(target: Any, copy: dict[Any, Any]) -> None:
    OrderedDict.clear(target)
    for key, value in copy.items():
        OrderedDict.__setitem__(target, key, value)


def _put_list(target: Any, copy: list[Any]) -> None:
    list.__setitem__(target, slice(None), copy)


def _put_bytes(target: bytearray, copy: bytes) -> None:
    target[:] = copy


def _put_array(target: array.array[Any], copy: bytes) -> None:
    del target[:]
    target.frombytes(copy)


def _put_set(target: Any, copy: set[Any]) -> None:
    set.clear(target)
    set.update(target, copy)


def _put_deque(target: Any, copy: Any) -> None:
    deque.clear(target)
    deque.extend(target, copy)


def _copy_deque(target: Any) -> list[Any]:
    return [*deque.__iter__(target)]


def _copy_cell(cell: CellType) -> tuple[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return (MISSING,)


def _put_cell(cell: CellType, copy: tuple[Any]) -> None:
    if copy[0] is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = copy[0]


def _copy_context(variable: ContextVar[Any]) -> tuple[Any]:
    try:
        return (variable.get(),)
    except LookupError:
        return (MISSING,)


def _put_context(variable: ContextVar[Any], copy: tuple[Any]) -> None:
    if copy[0] is not MISSING:
        variable.set(copy[0])


_SET_BY_LIBRARIES = (b"TORCH", b"KINETO", b"TRITON", b"CUDA")
"""How the names of variables begin that torch and what it loads set as they are first used."""


def _copy_environment(held: dict[bytes, bytes]) -> dict[bytes, bytes]:
    return {name: value for name, value in held.items() if not name.startswith(_SET_BY_LIBRARIES)}


def _put_environment(held: dict[bytes, bytes], copy: Mapping[bytes, bytes]) -> None:
    """Go through ``os``, which tells other programs of it too."""
    for name in _copy_environment(held).keys() - copy.keys():
        del os.environb[name]
    for name, value in copy.items():
        if held.get(name) != value:
            os.environb[name] = value


def _variables(_target: Any, copy: Mapping[bytes, bytes]) -> Iterable[tuple[str, str]]:
    return ((os.fsdecode(name), os.fsdecode(value)) for name, value in copy.items())


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic_debug_mode": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    **{
        f"backends.cudnn.{name}": (
            partial(getattr, torch.backends.cudnn, name),
            partial(setattr, torch.backends.cudnn, name),
        )
        for name in ("enabled", "benchmark", "deterministic")
    },
}
"""Of torch, for the whole process: what reads and what writes each."""


def _copy_settings(_target: Any) -> tuple[Any, ...]:
    return tuple(read() for read, _ in _SETTINGS.values())


def _put_settings(_target: Any, copy: Sequence[Any]) -> None:
    for (read, write), value in zip(_SETTINGS.values(), copy, strict=True):
        if read() != value:
            write(value)


def _by_setting(_target: Any, copy: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(_SETTINGS, copy, strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class NamesIn:
    """Some names of a dictionary, such as a module's globals."""

    names: tuple[str, ...]
    namespace: dict[str, Any]


def _copy_names(target: NamesIn) -> list[Any]:
    get = target.namespace.get
    return [get(name, MISSING) for name in target.names]


def _put_names(target: NamesIn, copy: Sequence[Any]) -> None:
    for name, value in zip(target.names, copy, strict=True):
        if value is MISSING:
            _unbind(target.namespace, name)
        else:
            target.namespace[name] = value


def _unbind(namespace: dict[str, Any], name: str) -> None:
    """Take a name away, unless it is a loaded module's, which no import would bind again."""
    if not isinstance(namespace.get(name), ModuleType):
        namespace.pop(name, None)


def _copy_globals(target: dict[str, Any]) -> dict[str, Any]:
    """Copy a module's globals, without what Python keeps there for itself."""
    return {name: value for name, value in target.items() if not name.startswith("__")}


def _put_globals(target: dict[str, Any], copy: dict[str, Any]) -> None:
    for name in _copy_globals(target).keys() - copy.keys():
        _unbind(target, name)
    target.update(copy)


@dataclass(frozen=True, slots=True, eq=False)
class SlotsOf:
    """The slots of an object, with what reads and writes each."""

    names: tuple[str, ...]
    slots: tuple[Any, ...]
    instance: Any


def _copy_slots(target: SlotsOf) -> list[Any]:
    return [_slot(slot, target.instance) for slot in target.slots]


def _slot(slot: Any, instance: Any) -> Any:
    try:
        return slot.__get__(instance)
    except AttributeError:
        return MISSING


def _put_slots(target: SlotsOf, copy: Sequence[Any]) -> None:
    for slot, value in zip(target.slots, copy, strict=True):
        if value is not MISSING:
            slot.__set__(target.instance, value)
        elif _slot(slot, target.instance) is not MISSING:
            slot.__delete__(target.instance)


_OF_EVERY_CLASS = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__abstractmethods__", "_abc_impl")
)


def _copy_class(target: type) -> dict[str, Any]:
    return {name: value for name, value in vars(target).items() if name not in _OF_EVERY_CLASS}


def _in_class(target: type) -> Iterable[Any]:
    return vars(target).values()


def _put_class(target: type, copy: dict[str, Any]) -> None:
    now = _copy_class(target)
    for name in now.keys() - copy.keys():
        type.__delattr__(target, name)
    for name, value in copy.items():
        if now.get(name, MISSING) is not value:
            type.__setattr__(target, name, value)


_OF_FUNCTIONS = ("__defaults__", "__kwdefaults__", "__code__")


def _copy_function(target: FunctionType) -> tuple[Any, ...]:
    return target.__defaults__, target.__kwdefaults__, target.__code__


def _put_function(target: FunctionType, copy: tuple[Any, ...]) -> None:
    target.__defaults__, target.__kwdefaults__, target.__code__ = copy


def _put_class_of(instance: Any, copy: type) -> None:
    if type(instance) is not copy:
        object.__setattr__(instance, "__class__", copy)


def _put_namespace_of(instance: Any, copy: Any) -> None:
    if instance.__dict__ is not copy:
        object.__setattr__(instance, "__dict__", copy)


def identity(kind: Kind, target: Any) -> tuple[Kind, int]:
    """Return what stays the same however often a container is met."""
    if kind is NAMES:
        return kind, id(target.namespace)
    return kind, id(target.instance if kind is SLOTS else target)


def names_of(kind: Kind, target: Any, copy: Any) -> Iterable[Any]:
    """List the names of a copy of a container, in the order of its values."""
    if kind is NAMES or kind is SLOTS:
        names: Iterable[Any] = target.names
        return names
    return [""] if kind in _NAMELESS else copy


def _itself(copy: Any) -> Any:
    return copy


def _numbered(_target: Any, copy: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    return enumerate(copy)


def _members(_target: Any, copy: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    return ((each, each) for each in copy)


def _items(_target: Any, copy: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
    return copy.items()


def _by_name(target: Any, copy: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    return (pair for pair in zip(target.names, copy, strict=True) if pair[1] is not MISSING)


def _by_function_part(_target: Any, copy: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(_OF_FUNCTIONS, copy, strict=True)


def _nothing(_copy: Any) -> Iterable[Any]:
    return ()


def _results_in(cache: Any) -> tuple[Any, ...]:
    """List what ``functools.lru_cache`` remembers; only the garbage collector knows where.

    A cache without bounds has its results in a dict. Another holds its keys and results itself,
    beside a dict of the links between them, which nobody may write to.

    Source: ``lru_cache_tp_traverse`` in cpython/Modules/_functoolsmodule.c, Python 3.11.
    """
    if not cache.cache_info().currsize:
        return ()
    held = [each for each in gc.get_referents(cache) if each is not cache.__dict__]
    dicts = [each for each in held if type(each) is dict]
    if cache.cache_info().maxsize is None:
        return tuple(value for each in dicts for value in dict.values(each))
    links = [each for each in dicts if any(type(v).__name__ == _LINK for v in dict.values(each))]
    own = (*links, cache.__wrapped__)
    return tuple(each for each in held if not any(each is one for one in own))


def _forget(cache: Any, copy: Any) -> None:
    """Empty what was empty; what has come to other results cannot be told from them."""
    if not copy:
        cache.cache_clear()


def _content(_target: Any, copy: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    return (("", value) for value in copy if value is not MISSING)


def _only(name: str) -> Callable[[Any, Any], Iterable[tuple[Any, Any]]]:
    return lambda _target, copy: ((name, copy),)


_IN_DICT = (dict.__iter__, dict.values)
_IN_ORDERED = (OrderedDict.__iter__, OrderedDict.values)

DICT = Kind("dict", dict.copy, dict.values, _put_dict, _items, _IN_DICT)
NAMESPACE = Kind("namespace", dict.copy, dict.values, _put_dict, _items, _IN_DICT, True)
ORDERED_DICT = Kind("ordered dict", _copy_ordered, dict.values, _put_ordered, _items, _IN_ORDERED)
MEMBERS = Kind("members", dict.copy, dict.values, _put_dict, _items, _IN_DICT, True)
ORDERED_MEMBERS = Kind(
    "members", _copy_ordered, dict.values, _put_ordered, _items, _IN_ORDERED, True
)
LIST = Kind("list", list.copy, _itself, _put_list, _numbered, (list.__iter__,))
DEQUE = Kind("deque", _copy_deque, _itself, _put_deque, _numbered, (deque.__iter__,))
SET = Kind("set", set.copy, _itself, _put_set, _members, (set.__iter__,))
ARRAY = Kind("array", array.array.tobytes, _nothing, _put_array, _numbered)
BYTES = Kind("bytearray", bytes, _nothing, _put_bytes, _numbered)
CELL = Kind("closure variable", _copy_cell, _itself, _put_cell, _content, (_copy_cell,), True)
CONTEXT = Kind(
    "context variable", _copy_context, _itself, _put_context, _content, (_copy_context,), True
)
ENVIRONMENT = Kind(
    "environment", _copy_environment, dict.values, _put_environment, _variables, _IN_DICT
)
"""Of the dict that ``os.environb`` reads from: through itself that takes forty times as long."""
SETTINGS = Kind(
    "settings", _copy_settings, _itself, _put_settings, _by_setting, (_copy_settings,), True
)
NAMES = Kind("globals", _copy_names, _itself, _put_names, _by_name, (_copy_names,), True)
ALL_NAMES = Kind("all globals", _copy_globals, dict.values, _put_globals, _items, _IN_DICT, True)
SLOTS = Kind("slots", _copy_slots, _itself, _put_slots, _by_name, (_copy_slots,), True)
CLASS = Kind("class", _copy_class, dict.values, _put_class, _items, (vars, _in_class), True)
FUNCTION = Kind(
    "function",
    _copy_function,
    _itself,
    _put_function,
    _by_function_part,
    (_copy_function,),
    True,
)
CACHE = Kind("cache", _results_in, _itself, _forget, lambda *_: ())
CLASS_OF = Kind("class of", type, _nothing, _put_class_of, _only("__class__"), (), True)
"""Which class an object is of: parametrizations give a module another one."""
NAMESPACE_OF = Kind(
    "namespace of", attrgetter("__dict__"), _nothing, _put_namespace_of, _only("__dict__"), (), True
)
"""Which dict an object has its attributes in."""
_NAMELESS = (CELL, CONTEXT)
"""Kinds that hold one value, which has the container's own name."""
BY_NAME = frozenset((NAMESPACE, MEMBERS, ORDERED_MEMBERS, CELL, NAMES, ALL_NAMES, SLOTS, CLASS))
"""Kinds of which a single name can be looked at apart from the others."""
