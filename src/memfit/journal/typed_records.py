"""Makes records of rows that were read, if each value is of the type that its field has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_R = TypeVar("_R")
_MOST = 10**30
"""No count, size or time of a run is beyond; NaN and infinity are not below."""


def record_of(kind: type[_R], row: Mapping[str, Any]) -> _R | None:
    """Make a record of the fields that this version knows.

    Returns:
        None where some are missing, or hold what cannot be there.
    """
    types = _types(kind)  # type: ignore[arg-type]  # a class can be hashed
    known: dict[str, Any] = {}
    for name, value in row.items():  # in one go: a journal may have a million of values
        allowed = types.get(name)
        if allowed is None:
            continue
        if type(value) is list:
            value = tuple(value)  # noqa: PLW2901 - as records hold it
        if not _is_of(value, *allowed):
            return None
        known[name] = value
    try:
        return kind(**known)
    except TypeError:
        return None


@cache
def _types(kind: type) -> dict[str, tuple[frozenset[type], frozenset[type]]]:
    """Return the types of each field, and those of its entries where it is a tuple."""
    return {name: _types_of(hint) for name, hint in get_type_hints(kind).items()}


def _types_of(hint: Any) -> tuple[frozenset[type], frozenset[type]]:
    plain: set[type] = set()
    entries: set[type] = set()
    for each in get_args(hint) if get_origin(hint) is UnionType else (hint,):
        if get_origin(each) is tuple:
            plain.add(tuple)
            entries.update(get_args(each)[:1])
        else:
            plain |= {int, float} if each is float else {NoneType if each is None else each}
    return frozenset(plain), frozenset(entries)


def _is_of(value: Any, plain: frozenset[type], entries: frozenset[type]) -> bool:
    kind = type(value)
    if kind not in plain:
        return False
    if kind is int or kind is float:
        return bool(-_MOST < value < _MOST)
    return kind is not tuple or all(type(entry) in entries for entry in value)
