"""Tells types whose objects have no state from those whose state cannot be put back."""

from __future__ import annotations

import asyncio
import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import mmap
import operator
import pathlib
import queue
import re
import socket
import subprocess
import threading
import types
import uuid
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from memfit.live_state.findings import PLAIN_TYPES, Obstacle, Place


class Instrument:
    """Marks objects of memfit that a job's tensors or modules hold while it looks at a step.

    What they have noted is no state of the job, and is never put back.
    """


_HARMLESS: tuple[Any, ...] = (
    Instrument,
    *(*PLAIN_TYPES, range, slice, type(Ellipsis), type(NotImplemented), types.CodeType, memoryview),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, pathlib.PurePath, re.Pattern, re.Match, enum.Enum),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller, np.generic, np.dtype),
    *(np.ufunc, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo),
    *(torch.iinfo, torch.Size, torch.Stream, torch.Event, torch.UntypedStorage, torch.TypedStorage),
    *(types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.GenericAlias, types.UnionType),
    type(vars(collections.namedtuple("_Pair", "first"))["first"]),
    *(torch.autograd.graph.Node, BaseException, types.FrameType, types.TracebackType),
)
"""Objects of these types cannot change, or nothing that they hold has a part in the results."""

_REGISTRATIONS = ("torch._ops", "torch._library", "torch.library")
"""Modules of torch whose objects are operators, and what has been registered for them."""

_UNCHANGING = ("pyarrow.", "tokenizers.")
"""Packages whose objects are data that stays, or are set anew by every call that uses them."""

_LOCKS: tuple[type, ...] = (
    *(type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event),
    *(threading.Semaphore, threading.Barrier),
)

_OBSTACLES: tuple[tuple[tuple[type, ...], str, str], ...] = (
    ((io.IOBase, io.TextIOBase), "file", "how far it has been read or written"),
    ((mmap.mmap,), "file", "what lies in the file"),
    ((socket.socket,), "socket", "what was sent and received"),
    (_LOCKS, "lock", "who holds it"),
    ((threading.Thread, threading.local), "thread", "what it has done"),
    ((BaseProcess, subprocess.Popen), "process", "what it has done"),
    ((queue.Queue, queue.SimpleQueue), "queue", "what lies in it"),
    (
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, asyncio.Future),
        "iterator",
        "how far it has come",
    ),
)


@functools.cache
def is_harmless(kind: type[Any]) -> bool:
    """Return whether objects of a type have no state that matters."""
    return issubclass(kind, _HARMLESS) or kind.__module__.startswith(
        (*_REGISTRATIONS, *_UNCHANGING)
    )


def obstacle_of(instance: object, place: Place) -> Obstacle | None:
    """Say why an object cannot be put back; None if it can, through its attributes."""
    of_type: Any = type(instance)
    found = _obstacle_of_type(of_type)
    if found is None:
        return None
    kind, what = found
    return Obstacle(
        place.owner,
        kind,
        f"{place.text} is {_named(of_type)}: {what} cannot be put back.",
    )


def _named(kind: type) -> str:
    article = "an" if kind.__name__[:1].lower() in "aeiou" else "a"
    return f"{article} {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


@functools.cache
def _obstacle_of_type(kind: type[Any]) -> tuple[str, str] | None:
    if kind is types.SimpleNamespace:
        return None
    for types_of_kind, name, what in _OBSTACLES:
        if issubclass(kind, types_of_kind):
            return name, what
    if not is_made_in_python(kind):
        if issubclass(kind, Iterator):
            return "iterator", "how far it has come"
        return "extension", "what it keeps outside Python"
    return None


def is_made_in_python(kind: type) -> bool:
    """Return whether a class and all its bases were written in Python, apart from ``object``."""
    return all(
        base.__flags__ & (_IS_HEAP_TYPE | _IS_IMMUTABLE) == _IS_HEAP_TYPE
        and _metaclass_is_known(base)
        for base in kind.__mro__
        if base is not object and base.__module__ not in _PYTHONS_OWN
    )


_IS_HEAP_TYPE = 1 << 9
"""Py_TPFLAGS_HEAPTYPE (cpython/Include/object.h): made while running, as classes in Python are."""
_IS_IMMUTABLE = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE: types of the standard library that are written in C."""
_PYTHONS_OWN = ("typing", "abc", "_abc")


def _metaclass_is_known(kind: type) -> bool:
    return "pybind11" not in type(kind).__name__ and "nanobind" not in type(kind).__name__
