"""Says, for each type of object, what it takes itself and what else it leads to."""

from __future__ import annotations

import functools
import gc
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from .bounds import bounds_of_owner
from .contents import (
    Attributes,
    LruWrapper,
    class_attributes,
    class_module,
    dict_items,
    frame_variables,
    function_variables,
    isinstance_of,
    lineage,
    list_items,
    other_items,
)
from .roots import is_user_file
from .sizes import LeafSize, Storages, is_array

_LARGE_LEAF_BYTES = 4096
"""What a variable or attribute refers to is followed by itself from here on."""
_LARGE_TEXT_BYTES = 65_536
_SMALL_DICT_BYTES = 100
_NUMBER = re.compile(r"[0-9]{1,18}")
_OWN_PACKAGE = __name__.rpartition(".")[0]
_LIBRARY = f"{__name__.partition('.')[0]}."
_CACHE_BOUND = 100_000
"""A cache that keeps at most so many entries will stop growing."""
_OWNERS: tuple[tuple[type, str], ...] = (
    (nn.Module, "module"),
    (torch.utils.data.Dataset, "dataset"),
    (torch.optim.Optimizer, "optimizer"),
)
_CLASS_HOLDS = {list, dict, set, deque, OrderedDict, defaultdict, torch.Tensor}
_OWN_CLASS_HOLDS = _CLASS_HOLDS | {types.FunctionType, staticmethod, classmethod, LruWrapper}
"""What is looked at among the attributes of a class: of any, and of the program's own."""
Items = list[tuple[str, Any, Any]]


@dataclass(slots=True)
class Reading:
    """One object as it was read."""

    kind: str
    num_bytes: int = 0
    items: Any = ()
    """How each item is held, its name, and the item."""
    count: int = 0
    weight: float = 1.0
    """How many each of the items stands for."""
    type_name: str = ""
    value_kind: str = ""
    num_graph_nodes: int = 0
    place: str = "host"
    is_pinned: bool = False
    is_shared: bool = True
    """It can be reached by several paths and counts for the first alone."""
    is_inline: bool = False
    is_large: bool = False
    is_class: bool = False
    is_bounded: bool = False
    is_ordered: bool = True
    is_memfits: bool = False
    num_rows: int = 0
    bounds: tuple[int, ...] = ()


Reader = Callable[[Any], Reading | None]


def _atom(value: Any) -> Reading | None:
    return Reading("leaf", num_bytes=sys.getsizeof(value), is_shared=False)


def _nothing(_: Any) -> Reading | None:
    return None


def _text(value: Any) -> Reading | None:
    num_bytes = sys.getsizeof(value)
    large = num_bytes >= _LARGE_TEXT_BYTES
    return Reading("leaf", num_bytes=num_bytes, value_kind="text", is_shared=large, is_large=large)


def _leaf(leaf: LeafSize, value_kind: str) -> Reading:
    return Reading(
        "leaf",
        num_bytes=leaf.num_bytes,
        num_graph_nodes=leaf.num_graph_nodes,
        place=leaf.place,
        num_rows=leaf.num_rows,
        is_pinned=leaf.is_pinned,
        value_kind=value_kind,
        is_large=leaf.num_bytes >= _LARGE_LEAF_BYTES or leaf.num_graph_nodes > 0,
    )


def _list(value: Any) -> Reading | None:
    items, weight = list_items(value)
    count = list.__len__(value)
    return Reading(
        "list",
        num_bytes=56 + 8 * count,
        items=[("index", index, item) for index, item in items],
        count=count,
        weight=weight,
    )


def _dict(value: Any) -> Reading | None:
    items, weight = dict_items(value)
    count = dict.__len__(value)
    found: Items = [
        ("index", f"key {n}", key) for n, (key, _) in enumerate(items) if not _is_name(key)
    ]
    found += [("key", key, item) for key, item in items]  # the newest come last
    if not count:
        return Reading("dict", type_name=type(value).__name__, num_bytes=64)
    return Reading(
        "dict",
        num_bytes=_SMALL_DICT_BYTES * count,
        items=found,
        count=count,
        weight=weight,
        is_ordered=_is_log([key for key, _ in items]),
    )


def _is_name(key: Any) -> bool:
    return type(key) in {str, int, float, bool}


def _is_log(keys: list[Any]) -> bool:
    """Return whether keys are never met again: numbers that rise, counted names, tensors."""
    numbers = [key for key in keys if type(key) is int]
    if len(numbers) == len(keys):
        return all(before < after for before, after in pairwise(numbers))
    names = [key for key in keys if type(key) is str]
    return all(
        (type(key) is str and key[-1:].isdigit())
        or type(key) is torch.Tensor
        or (type(key) is tuple and any(type(each) is torch.Tensor for each in key))
        for key in keys
    ) and (not names or _is_counting(names))


def _is_counting(names: list[str]) -> bool:
    """Test whether a number in the names rises, as in ``epoch3-batch7``; words have any numbers."""
    rows = [[int(digits) for digits in _NUMBER.findall(name)] for name in names]
    return any(
        all(before <= after for before, after in pairwise(column)) and column[0] < column[-1]
        for column in zip(*rows, strict=False)
    )


def _other(value: Any) -> Reading | None:
    items, count, weight = other_items(value)
    is_deque = isinstance_of(value, deque)
    limit = deque.__dict__["maxlen"].__get__(value) if is_deque else None
    return Reading(
        "deque" if is_deque else "set",
        num_bytes=(8 if is_deque else 32) * count,
        items=[("index", index, item) for index, item in enumerate(items)],
        count=count,
        weight=weight,
        is_bounded=limit is not None and limit <= _CACHE_BOUND,
        is_ordered=is_deque,
    )


def _inline(items: Iterable[tuple[Any, Any]], num_bytes: int = 64) -> Reading:
    return Reading(
        "inline", num_bytes=num_bytes, items=[("", *each) for each in items], is_inline=True
    )


def _tuple(value: Any) -> Reading | None:
    length = tuple.__len__(value)
    return _inline((index, tuple.__getitem__(value, index)) for index in range(min(length, 64)))


def _method(value: Any) -> Reading | None:
    return _inline((("__self__", value.__self__), ("__func__", value.__func__)))


def _partial(value: Any) -> Reading | None:
    return _inline((("func", value.func), ("args", value.args), ("keywords", value.keywords)))


def _function(value: Any) -> Reading | None:
    items = list(function_variables(value))
    return Reading("function", 136, items, type_name=value.__name__) if items else None


def _lru(value: Any) -> Reading | None:
    information = LruWrapper.cache_info(value)
    limit, count = information.maxsize, information.currsize
    caches = [
        each
        for each in gc.get_referents(value)
        if type(each) is dict and len(each) == count and count
    ]
    items = [("attribute", "cache", cache) for cache in caches[:1]] if limit is None else []
    items += [("attribute", "__wrapped__", value.__dict__.get("__wrapped__"))]
    return Reading(
        "lru_cache",
        items=items,
        count=count,
        is_bounded=limit is not None and limit <= _CACHE_BOUND,
    )


def _generator(value: Any) -> Reading | None:
    frame = value.gi_frame
    return Reading("generator", items=_frame_items(frame)) if frame is not None else None


def _frame(value: Any) -> Reading | None:
    return Reading("frame", items=_frame_items(value), type_name=value.f_code.co_name)


def _frame_items(frame: types.FrameType) -> Items:
    return [("attribute", name, value) for name, value in frame_variables(frame)]


def _traceback(value: Any) -> Reading | None:
    items = (("tb_frame", value.tb_frame), ("tb_next", value.tb_next))
    return Reading("traceback", 64, [("attribute", *each) for each in items])


def _exception(value: Any) -> Reading | None:
    names = ("args", "__traceback__", "__context__", "__cause__")
    items = [
        ("attribute", name, BaseException.__dict__[name].__get__(value))
        for name in names
        if name in BaseException.__dict__
    ]
    return Reading("exception", 100, items, type_name=type(value).__name__)


def _class(value: Any) -> Reading | None:
    """Read the variables of a class; the methods of the program's own classes as well."""
    module = sys.modules.get(class_module(value))
    file = getattr(module, "__file__", "") if type(module) is types.ModuleType else ""
    is_own = class_module(value) == "__main__" or (type(file) is str and is_user_file(file))
    wanted = _OWN_CLASS_HOLDS if is_own else _CLASS_HOLDS
    items: Items = [
        ("attribute", name, each.__func__ if type(each) in {staticmethod, classmethod} else each)
        for name, each in class_attributes(value)
        if type(each) in wanted and not (name.startswith("__") and name.endswith("__"))
    ]
    name = type.__dict__["__name__"].__get__(value)
    return Reading("class", 0, items, type_name=str(name), is_class=True) if items else None


def _instance_reader(kind: type) -> Reader:
    """Make a reader for the instances of a class."""
    attributes = Attributes(kind)
    classes = lineage(kind)
    role = next((word for base, word in _OWNERS if base in classes), "object")
    name = str(type.__dict__["__name__"].__get__(kind))
    if any(str(type.__dict__["__name__"].__get__(each)) == "Metric" for each in classes):
        name = f"Metric {name}"
    is_memfits = class_module(kind).startswith(_LIBRARY)
    builtin = _builtin_part(classes)
    if not attributes.any and builtin is None:
        return _opaque

    def read(value: Any) -> Reading | None:
        part = builtin(value) if builtin is not None else None
        reading = part or Reading(role, 48)
        reading.type_name = name
        reading.is_memfits = is_memfits
        held = attributes.of(value)
        reading.bounds = bounds_of_owner(held)
        items = [("attribute", key, item) for key, item in held if not _is_empty(item)]
        reading.items = [*reading.items, *items, ("class", name, kind)]
        reading.num_bytes += 16 * len(held)
        return reading

    return read


def _is_empty(value: Any) -> bool:
    """Say of small things at once that there is nothing in them."""
    kind = type(value)
    return kind in {bool, int, float, type(None)} or (kind in {dict, set, tuple} and not value)


def _builtin_part(classes: tuple[type, ...]) -> Reader | None:
    parts = ((list, _list), (dict, _dict), (BaseException, _exception))
    found = next((reader for base, reader in parts if base in classes), None)
    if found is None and any(each in classes for each in (set, frozenset, deque)):
        return _other
    return found


def _opaque(value: Any) -> Reading | None:
    """Read objects of types made in C, such as iterators, by what the collector sees in them."""
    if not gc.is_tracked(value):
        return None
    items = gc.get_referents(value)[:64]
    found = [("attribute", f"<{index}>", item) for index, item in enumerate(items)]
    return Reading("object", 48, found, type_name=type(value).__name__) if found else None


class LeafReader:
    """Read tensors and arrays, each storage once within a look."""

    def __init__(self, seen: Set[int]) -> None:
        self._seen = seen
        self._storages = Storages()

    def tensor(self, value: Any) -> Reading | None:
        """Read a tensor, its graph and its hooks."""
        if id(value) in self._seen:
            return None
        reading = _leaf(self._storages.of_tensor(value), "tensor")
        with torch._C.DisableTorchFunction():
            hooks = value._backward_hooks if value.requires_grad else None
        if hooks:
            reading.kind = "tensor"
            reading.items = [("attribute", "_backward_hooks", hooks)]
        return reading

    def array(self, value: Any) -> Reading | None:
        """Read a numpy array; of objects their references alone."""
        if not is_array(value):
            return None
        if value.dtype.hasobject:
            return _leaf(LeafSize(num_bytes=8 * int(value.size)), "array")
        return _leaf(self._storages.of_array(value), "array")

    def reader_of(self, kind: type) -> Reader:
        """Choose how instances of a type are read."""
        known = READERS.get(kind)
        if known is not None:
            return known
        classes = lineage(kind)
        if torch.Tensor in classes:
            return self.tensor
        if kind.__name__ == "ndarray" and kind.__module__ == "numpy":
            return self.array
        if types.ModuleType in classes or class_module(kind).startswith(_OWN_PACKAGE):
            return _nothing
        if type in classes:
            return _class
        return _tuple if tuple in classes else _instance_reader(kind)


READERS: Mapping[type, Reader] = {
    **dict.fromkeys((int, float, complex, bool, type(None), type(...)), _atom),
    **dict.fromkeys((str, bytes, bytearray), _text),
    **dict.fromkeys(
        (types.CodeType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size),
        _nothing,
    ),
    list: _list,
    dict: _dict,
    set: _other,
    frozenset: _other,
    deque: _other,
    tuple: _tuple,
    types.MethodType: _method,
    functools.partial: _partial,
    types.FunctionType: _function,
    LruWrapper: _lru,
    types.GeneratorType: _generator,
    types.FrameType: _frame,
    types.TracebackType: _traceback,
    type: _class,
}
