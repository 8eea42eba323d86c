"""Writes and reads names of modules in short: ``layers.0-11`` for twelve numbered siblings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

_RANGE = re.compile(r"(.*(?<!\d))(\d+)-(\d+)(.*)")
_NUMBERED = re.compile(r"(.*?)(\d+)([^\d]*)")
_MOST_NAMED = 3
_MOST_DIGITS = 18


def expand_names(patterns: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return the names behind names and ranges, in order, each once.

    Raises:
        ValueError: if one is not among the known names.

    Example:
        >>> expand_names(["layers.0-1", "head"], ["layers.0", "layers.1", "head"])
        ['layers.0', 'layers.1', 'head']
    """
    is_known = set(known)
    found: dict[str, None] = {}
    for pattern in patterns:
        for name in _expanded(pattern, is_known):
            if name not in is_known:
                near = ", ".join(get_close_matches(name, known, n=3, cutoff=0.4)) or "none"
                msg = f"the model has no module named {name!r} (near: {near})"
                raise ValueError(msg)
            found[name] = None
    return list(found)


def shorten_names(names: Iterable[str]) -> tuple[str, ...]:
    """Write runs of numbered siblings as ranges.

    Example:
        >>> shorten_names(["layers.0", "layers.1", "layers.2", "head"])
        ('layers.0-2', 'head')
    """
    short: list[str] = []
    run: list[str] = []
    for name in names:
        if run and not _follows(run[-1], name):
            short.append(_as_range(run))
            run = []
        run.append(name)
    if run:
        short.append(_as_range(run))
    return tuple(short)


def first_few(names: Sequence[str]) -> str:
    """Join names for a sentence; of many only the first.

    Example:
        >>> first_few(["a", "b", "c", "d"])
        'a, b, c, ...'
    """
    return ", ".join([*names[:_MOST_NAMED], *(["..."] if len(names) > _MOST_NAMED else [])])


def _expanded(pattern: str, is_known: set[str]) -> Iterator[str]:
    """Yield the names of a range one by one: the caller leaves off at the first that is unknown."""
    match = None if pattern in is_known else _RANGE.fullmatch(pattern)
    if match is None or max(len(match[2]), len(match[3])) > _MOST_DIGITS:
        yield pattern
        return
    before, first, last, after = match.groups()
    numbers = range(int(first), int(last) + 1)
    for number in numbers:
        yield f"{before}{number}{after}"
    if not numbers:
        yield pattern


def _follows(earlier: str, later: str) -> bool:
    first, second = _NUMBERED.fullmatch(earlier), _NUMBERED.fullmatch(later)
    if first is None or second is None or (first[1], first[3]) != (second[1], second[3]):
        return False
    has_zeros = any(match[2] != str(int(match[2])) for match in (first, second))
    return not has_zeros and int(second[2]) == int(first[2]) + 1


def _as_range(run: list[str]) -> str:
    if len(run) == 1:
        return run[0]
    match = _NUMBERED.fullmatch(run[0])
    last = _NUMBERED.fullmatch(run[-1])
    assert match is not None, "a run consists of numbered names"
    assert last is not None, "a run consists of numbered names"
    return f"{match[1]}{match[2]}-{last[2]}{match[3]}"
