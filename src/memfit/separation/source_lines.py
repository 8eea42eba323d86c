"""Finds the line of a user's code that changes an attribute, a global or a container."""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from memfit.live_state.named_globals import parts_of
from memfit.trace.origins import name_of_file

_SETS = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "STORE_NAME")
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_NAME")
_LIBRARIES = ("numpy", "random", "torch")
_BUILDERS = ("__init__", "__new__", "__post_init__", "reset", "reset_parameters")


def lines_that_set(name: str, owner: str, functions: Iterable[FunctionType]) -> str:
    """Name the best line known: one that sets a name, or else one that uses it; or nothing.

    Args:
        name: of an attribute, a global or a closure variable, perhaps with ``[…]`` behind it.
        owner: what holds it; functions that bear the name of its class go first.
        functions: the user's functions that a step can reach.
    """
    plain = re.split(r"[\[. ]", name or owner.rpartition(".")[2])[0]
    known = [each for each in functions if each.__name__ not in _BUILDERS]
    found = (
        line
        for opnames in (_SETS, _READS)
        for function in known
        for alias in _aliases(plain, function)
        for line in _lines(function.__code__, alias, opnames)
    )
    return next(found, "")


def _aliases(name: str, function: FunctionType) -> Iterator[str]:
    """Yield a name, and what a function calls the library of that name."""
    yield name
    library = sys.modules.get(name) if name in _LIBRARIES else None
    if library is not None:
        yield from (key for key, value in function.__globals__.items() if value is library)


def _lines(code: CodeType, name: str, opnames: tuple[str, ...]) -> Iterator[str]:
    for part in parts_of(code):
        file = name_of_file(part.co_filename)
        line = part.co_firstlineno
        for instruction in dis.get_instructions(part):
            line = instruction.starts_line or line
            if file and instruction.opname in opnames and instruction.argval == name:
                yield f"{file}:{line}"
