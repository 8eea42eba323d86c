"""Everything that objects hold, as flat data that can be compared to the bit."""

from __future__ import annotations

import io
import itertools
import random
import re
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range)
_LEFT_OUT = (
    types.ModuleType,
    types.CodeType,
    weakref.ref,
    property,
    torch._C._VariableFunctionsClass,
)
_OWN = ("guard_scenarios", "corpus.promises")


def _is_own(module: str) -> bool:
    """Return whether a module is one of those whose state is in question."""
    return any(own in module for own in _OWN)


def digest(**roots: Any) -> dict[str, Any]:
    """Get all that can be reached from some objects, by path; shared objects are told as such."""
    walk = _Walk()
    for name, root in roots.items():
        walk.into(name, root)
    return walk.found


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Name what is not the same."""
    return sorted(
        path
        for path in {**found, **wanted}
        if path not in found or path not in wanted or found[path] != wanted[path]
    )


class _Walk:
    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self._seen: dict[int, tuple[int, Any]] = {}

    def into(self, path: str, value: Any) -> None:
        """Note a value and what it holds."""
        if isinstance(value, _LEFT_OUT) or self._is_foreign(value):
            return
        if isinstance(value, _PLAIN):
            self.found[path] = value
        elif isinstance(value, float):
            self.found[path] = value.hex()
        elif id(value) in self._seen:
            self.found[path] = f"same as {self._seen[id(value)][0]}"
        else:
            self._seen[id(value)] = len(self._seen), value
            self.found[path] = type(value).__qualname__
            for name, part in _parts(path, value):
                self.into(path + name, part)

    @staticmethod
    def _is_foreign(value: Any) -> bool:
        """Return whether something belongs to memfit, or is a class of somebody else's."""
        kind = value if isinstance(value, type) else type(value)
        module = getattr(kind, "__module__", "") or ""
        if module.startswith("memfit."):
            return True
        if isinstance(value, types.FunctionType) and (value.__module__ or "").startswith("memfit."):
            return True
        return isinstance(value, type) and not _is_own(module)


def _parts(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    """List what an object holds."""
    for kinds, parts in _READERS:
        if isinstance(value, kinds):
            return parts(path, value)
    return _attributes(path, value)


def _tensor(path: str, value: torch.Tensor) -> Iterator[tuple[str, Any]]:
    del path
    dense = value.detach().to_dense() if value.layout is torch.sparse_coo else value.detach()
    yield ".like", f"{dense.dtype} {tuple(dense.shape)} {value.requires_grad} {value.is_leaf}"
    yield ".bytes", dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if value.is_leaf:
        yield ".grad", value.grad
    for name, attribute in vars(value).items():
        yield f".{name}", attribute


def _mapping(path: str, value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    if re.search(r"hooks?\w*$|_handles$", path):  # keys are numbers that go on through the process
        yield from ((f"[{n}]", part) for n, part in enumerate(value.values()))
        return
    for number, (key, part) in enumerate(value.items()):
        if isinstance(key, (str, int, float, tuple)):
            yield f"[{number}]", key
        yield f"[{key!r}]" if isinstance(key, (str, int, float)) else f"[#{number}]", part
    yield from _attributes(path, value)


def _sequence(path: str, value: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    parts = [*value]
    yield ".length", len(parts)
    yield from ((f"[{number}]", part) for number, part in enumerate(parts))
    if isinstance(value, deque):
        yield ".maxlen", value.maxlen
    yield from _attributes(path, value)


def _set(path: str, value: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    del path
    yield ".members", " ".join(sorted(map(repr, value)))


def _function(path: str, value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    del path
    for number, cell in enumerate(value.__closure__ or ()):
        try:
            yield f"<{value.__code__.co_freevars[number]}>", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield ".defaults", [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    yield from ((f".{name}", part) for name, part in vars(value).items())
    for name in value.__code__.co_names:
        if name in value.__globals__ and _is_own(value.__globals__["__name__"]):
            yield f"<global {name}>", value.__globals__[name]


def _method(path: str, value: types.MethodType) -> Iterator[tuple[str, Any]]:
    del path
    yield ".self", value.__self__
    yield ".function", value.__func__


def _generator_object(
    path: str, value: types.GeneratorType[Any, Any, Any]
) -> Iterator[tuple[str, Any]]:
    del path
    frame = value.gi_frame
    yield ".at", None if frame is None else frame.f_lasti
    yield ".locals", {} if frame is None else dict(frame.f_locals)


def _file(path: str, value: io.IOBase) -> Iterator[tuple[str, Any]]:
    del path
    if isinstance(value, (io.StringIO, io.BytesIO)):
        yield ".content", value.getvalue()
    elif not value.closed:
        value.flush()
        yield ".content", Path(value.name).read_bytes()  # type: ignore[attr-defined]


def _attributes(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    del path
    if isinstance(value, type):
        yield from ((f".{n}", v) for n, v in vars(value).items() if not n.startswith("__"))
        return
    for name, part in getattr(value, "__dict__", {}).items():
        yield f".{name}", part
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"} and hasattr(value, name):
                yield f".{name}", getattr(value, name)


_READERS: tuple[tuple[Any, Any], ...] = (
    (torch.Tensor, _tensor),
    (torch.Generator, lambda _, v: [(".state", v.get_state().numpy().tobytes())]),
    (np.ndarray, lambda _, v: [(".like", f"{v.dtype} {v.shape}"), (".bytes", v.tobytes())]),
    (np.generic, lambda _, v: [(".value", v.item())]),
    (np.random.Generator, lambda _, v: [(".state", repr(v.bit_generator.state))]),
    (np.random.RandomState, lambda _, v: [(".state", repr(v.get_state()))]),
    (random.Random, lambda _, v: [(".state", repr(v.getstate()))]),
    (itertools.count, lambda _, v: [(".state", repr(v))]),
    (types.GeneratorType, _generator_object),
    (io.IOBase, _file),
    (dict, _mapping),
    (weakref.WeakKeyDictionary, lambda p, v: _mapping(p, dict(v))),
    ((list, tuple, deque), _sequence),
    ((set, frozenset), _set),
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (types.CellType, lambda _, v: [(".content", v.cell_contents)]),
    (types.MappingProxyType, lambda p, v: _mapping(p, dict(v))),
)
