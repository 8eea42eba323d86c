"""Which global names a function's code reads or writes, and which modules it asks for."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from weakref import WeakKeyDictionary

from memfit.live_state.containers import CELL

_GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL"))
_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))
_BY_NAME = frozenset(("import_module", "__import__", "modules"))
"""What code names that finds modules by their names: of importlib, of Python's own, of sys."""
_ASKED_FOR: WeakKeyDictionary[CodeType, set[str]] = WeakKeyDictionary()
"""Which modules code has been seen to ask for by name in this process."""
_IMPORTS = frozenset(("IMPORT_NAME", "IMPORT_FROM"))


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the globals, the attributes and the modules that a piece of code names.

    Code that is nested in it (inner functions, comprehensions) counts as well.
    """
    found: tuple[set[str], set[str], set[str]] = (set(), set(), set())
    for part in parts_of(code):
        for instruction in dis.get_instructions(part):
            for names, kinds in zip(found, (_GLOBAL, _ATTRIBUTE, _IMPORTS), strict=True):
                if instruction.opname in kinds and isinstance(instruction.argval, str):
                    names.add(instruction.argval)
    return frozenset(found[0]), frozenset(found[1]), frozenset(found[2])


def parts_of(code: CodeType) -> Iterator[CodeType]:
    """Yield code and all code that is nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from parts_of(constant)


@functools.lru_cache(maxsize=4096)
def _imports_in(code: CodeType) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    """Return what the import statements in code say: dots in front, module, names."""
    found = []
    for part in parts_of(code):
        each = [*dis.get_instructions(part)]
        for level, names, imports in zip(each, each[1:], each[2:], strict=False):
            if imports.opname == "IMPORT_NAME":
                found.append((level.argval, imports.argval, names.argval or ()))
    return tuple(found)


def imported_names(function: FunctionType) -> Iterator[str]:
    """Yield what the modules that a function imports when it runs may be called."""
    package = function.__globals__.get("__package__") or ""
    for level, name, parts in _imports_in(function.__code__):
        above = [package.rsplit(".", level - 1)[0]] if level else []
        base = ".".join((*above, *([name] if name else [])))
        yield from (base, *(f"{base}.{part}" for part in parts))


def imported_modules(function: FunctionType) -> Iterator[ModuleType]:
    """Yield the modules, loaded already, that a function imports when it runs."""
    return _loaded(imported_names(function))


def modules_by_name(function: FunctionType) -> Iterator[ModuleType]:
    """Yield the modules, loaded already, that a function has asked for by name or has names of."""
    yield from _loaded(_ASKED_FOR.get(function.__code__, ()))
    yield from _loaded(names_at_hand(function))


def names_at_hand(function: FunctionType) -> Iterator[str]:
    """Yield texts in which a function that finds modules by their names may have them."""
    named, attributes, _ = names_in(function.__code__)
    by_name = _BY_NAME & (named | attributes)
    if not by_name or (by_name == {"modules"} and "sys" not in named):
        return
    values = [each for part in parts_of(function.__code__) for each in part.co_consts]
    values += [function.__globals__.get(name) for name in named]
    values += function.__defaults__ or ()
    values += (value for cell in function.__closure__ or () for value in CELL.copy(cell))
    for text in values:
        if type(text) is str:
            yield from (text, text.rpartition(".")[0])


def note_asked_for(code: CodeType, module: ModuleType) -> None:
    """Note that code asks for a module by a name that it makes as it runs."""
    _ASKED_FOR.setdefault(code, set()).add(module.__name__)


def _loaded(names: Iterable[str]) -> Iterator[ModuleType]:
    modules = (sys.modules.get(name) for name in names)
    return (module for module in modules if isinstance(module, ModuleType))
