"""Finds the lines of one version of the code in another: by file, function and text, not number.

A line that only moved is the same line. One that was edited is paired with what stood in the same
function and reads alike, so that a renamed variable is no change of memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from .moments import Held, KnownLine

_ALIKE = 0.6
"""How alike two lines are of which one was edited: of all characters, those they share in order."""
_MOST_LINES, _MOST_OTHERS = 500, 50
"""How many lines are held against how many others of their function."""
_SHORT = len("x = f(x)")
"""A line no longer than this is found anywhere."""
_Key = Callable[["CodeGroup"], Hashable]


@dataclass(slots=True, eq=False)
class CodeGroup:
    """Lines of one function that read the same, and what they hold together."""

    file: str
    function: str
    code: str
    source_lines: list[str] = field(default_factory=list)
    held: Held = field(default_factory=Counter)

    @property
    def source_line(self) -> str:
        """Name the lines: ``net.py:12``, or ``net.py:12, 15``."""
        first, *more = sorted(self.source_lines, key=lambda line: (len(line), line))
        return ", ".join([first, *(line.rpartition(":")[2] for line in more)])


Pair = tuple[CodeGroup | None, CodeGroup | None]


def matched(
    before: Iterable[KnownLine],
    after: Iterable[KnownLine],
    held_before: Mapping[str, Held],
    held_after: Mapping[str, Held],
) -> list[Pair]:
    """Pair what both versions have; what one has alone stands with None.

    Args:
        before: the lines of the first version.
        after: the lines of the second.
        held_before: what lines of the first hold, by their ``source_line``.
        held_after: the same of the second.
    """
    old, new = _groups(before, held_before), _groups(after, held_after)
    pairs: list[Pair] = []
    for key in (_in_file, _in_file_of_that_name):
        pairs += _equal_by(key, old, new)
    pairs += _edited(old, new)
    pairs += _equal_by(_text_elsewhere, old, new)
    return [*pairs, *((group, None) for group in old), *((None, group) for group in new)]


def _groups(lines: Iterable[KnownLine], held: Mapping[str, Held]) -> list[CodeGroup]:
    """Put lines together that read the same in one function; each without its text stays alone."""
    groups: dict[Hashable, CodeGroup] = {}
    known = {line.source_line: line for line in lines}
    unknown = (name for name in held if name and name not in known)
    untold = [KnownLine(source_line=name, function="", code="") for name in unknown]
    for line in (*known.values(), *untold):
        group = CodeGroup(line.source_line.rpartition(":")[0], line.function, line.code)
        key = group.file, line.function, line.code or line.source_line
        group = groups.setdefault(key, group)
        group.source_lines.append(line.source_line)
        group.held.update(held.get(line.source_line, {}))
    return list(groups.values())


def _in_file(group: CodeGroup) -> Hashable:
    return group.file, group.function, group.code or group.source_line


def _in_file_of_that_name(group: CodeGroup) -> Hashable:
    """Look past the folder: two copies of a repository are in folders of different names."""
    name = group.file.rpartition("/")[2]
    return name, group.function, group.code or group.source_line.rpartition("/")[2]


def _text_elsewhere(group: CodeGroup) -> Hashable:
    """Look past file and function, for code that was moved."""
    return group.code if len(group.code) > _SHORT else None


def _equal_by(key: _Key, old: list[CodeGroup], new: list[CodeGroup]) -> list[Pair]:
    """Take the groups out of both lists that are alone there with their key."""
    found = _by(key, new)
    pairs: list[Pair] = [
        (groups[0], found[each][0])
        for each, groups in _by(key, old).items()
        if each is not None and len(groups) == len(found.get(each, [])) == 1
    ]
    _take(pairs, old, new)
    return pairs


def _take(pairs: Iterable[Pair], *lists: list[CodeGroup]) -> None:
    """Take the groups of pairs out of lists."""
    taken = {id(group) for pair in pairs for group in pair}
    for groups in lists:
        groups[:] = [group for group in groups if id(group) not in taken]


def _by(key: _Key, groups: Iterable[CodeGroup]) -> dict[Hashable, list[CodeGroup]]:
    found: dict[Hashable, list[CodeGroup]] = {}
    for group in groups:
        found.setdefault(key(group), []).append(group)
    return found


def _edited(old: list[CodeGroup], new: list[CodeGroup]) -> list[Pair]:
    """Take the groups out of both lists that read alike in one function, the most alike first."""
    by_function = _by(_function_of, new)
    alike = [
        (SequenceMatcher(None, one.code, other.code, autojunk=False).ratio(), one, other)
        for one in old[:_MOST_LINES]
        for other in by_function.get(_function_of(one), [])[:_MOST_OTHERS]
        if one.code and other.code
    ]
    pairs: list[Pair] = []
    taken: set[int] = set()
    for likeness, one, other in sorted(alike, key=lambda pair: -pair[0]):
        if likeness >= _ALIKE and not taken & {id(one), id(other)}:
            taken |= {id(one), id(other)}
            pairs.append((one, other))
    _take(pairs, old, new)
    return pairs


def _function_of(group: CodeGroup) -> Hashable:
    return group.file.rpartition("/")[2], group.function
