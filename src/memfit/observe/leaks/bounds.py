"""Recognises the bounds that a program states for what it keeps, as in ``self.capacity = 500``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from .nodes import Node

_MOST = 10_000_000
_OF_OWNER = re.compile(r"capac|max|limit|bound|len|size|window|keep", re.IGNORECASE)
_OF_ANYTHING = re.compile(
    r"capacity|max_?(?:len|size|items|entries)"
    r"|(?:buffer|pool|bank|queue|memory|replay|cache)_?(?:len|size|limit)",
    re.IGNORECASE,
)
"""A variable of a whole script has to say clearly what it bounds."""
_OF_OTHERS = re.compile(
    r"step|epoch|iter|batch|hidden|seq|vocab|embed|image|patch|kernel", re.IGNORECASE
)
"""What a size of is no number of entries that are kept."""
_ROOM_FRACTION = 0.25
"""Of the memory; a bound that lets more come together is none."""


def bounds_of_owner(attributes: Iterable[tuple[Any, Any]]) -> tuple[int, ...]:
    """Return the bounds among the attributes of an object, for what it holds itself."""
    return tuple(
        value for name, value in attributes if type(value) is int and _is_of_owner(name, value)
    )


def bounds_of_program(variables: Iterable[tuple[Any, Any]]) -> tuple[int, ...]:
    """Return the bounds among the variables of a module or function, for anything."""
    return tuple(
        value
        for name, value in variables
        if type(value) is int and 1 < value <= _MOST and _names_a_bound(name)
    )


def is_within_bound(node: Node, of_program: Iterable[int], memory_bytes: int) -> bool:
    """Return whether a holder has not reached a bound that is stated for it, and there is room."""
    length = node.count or node.num_rows
    if not length:
        return False
    keeper = node.keeper()
    bounds = (*node.bounds, *(keeper.bounds if keeper is not None else ()), *of_program)
    most = memory_bytes * _ROOM_FRACTION * length / max(1, node.num_bytes)
    return any(length <= bound <= most for bound in bounds)


def _is_of_owner(name: Any, value: int) -> bool:
    return 1 < value <= _MOST and type(name) is str and _is_name_of_owner(name)


@lru_cache(maxsize=4096)
def _is_name_of_owner(name: str) -> bool:
    return bool(_OF_OWNER.search(name)) and not _OF_OTHERS.search(name)


def _names_a_bound(name: Any) -> bool:
    return type(name) is str and bool(_OF_ANYTHING.search(name))
