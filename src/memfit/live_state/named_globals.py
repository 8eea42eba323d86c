"""Which global names a function's code reads or writes."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

_GLOBAL = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL"))
_ATTRIBUTE = frozenset(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR"))
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


def imported_modules(code: CodeType, namespace: Mapping[str, Any]) -> Iterator[ModuleType]:
    """Yield the modules, loaded already, that code imports when it runs."""
    _, _, imported = names_in(code)
    package = namespace.get("__package__") or ""
    for name in imported:
        for candidate in (name, f"{package}.{name}"):
            module = sys.modules.get(candidate)
            if isinstance(module, ModuleType):
                yield module
