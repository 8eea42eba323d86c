"""A configuration file as text, with the place of each value in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

Scalar = str | int | float | bool | None
Value = Scalar | dict[str, bool]
"""What can be written: a scalar, or a group of switches that JSON files open together."""
Key = tuple[str, ...]
"""Names from the outside inwards; entries of a list are named by their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value and where it is written."""

    value: Scalar
    start: int = -1
    """The first character of the value in the text; -1 where the format's library keeps that."""
    end: int = -1
    key_start: int = -1
    line: int = 0
    """Counted from one; 0 where it is not known."""
    obstacle: str = ""
    """Why it cannot be changed by itself, as a clause; empty where it can."""
    is_quoted: bool = False


@dataclass(frozen=True, slots=True)
class Splice:
    """Replace a stretch of text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Insertion:
    """A key that is to be added behind one that is there, in the same group."""

    beside: Key
    name: str
    value: Value

    @property
    def key(self) -> Key:
        """Return the key as it will be found."""
        return (*self.beside[:-1], self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All values of a file, by their keys."""

    entries: Mapping[Key, Entry]
    groups: frozenset[Key] = frozenset({()})
    """What holds keys, the empty ones too; the file itself is ``()``."""
    inline: frozenset[Key] = frozenset()
    """The groups that are written within brackets."""
    closed: Mapping[Key, str] = field(default_factory=dict)
    """Groups that nothing can be added to, each with a clause that says why."""

    def values(self) -> dict[Key, Scalar]:
        """Return what the file says, without where."""
        return {key: entry.value for key, entry in self.entries.items()}

    def under(self, group: Key) -> list[str]:
        """List the names right below a group."""
        depth = len(group)
        keys = [*self.entries, *self.groups]
        below = (key[depth] for key in keys if len(key) > depth and key[:depth] == group)
        return list(dict.fromkeys(below))

    def nearest(self, key: Key, cutoff: float = 0.5) -> str | None:
        """Return the key that is most like one that is not there."""
        found = get_close_matches(dotted(key), map(dotted, self.entries), n=1, cutoff=cutoff)
        return found[0] if found else None


def dotted(key: Key) -> str:
    """Write a key as people do.

    >>> dotted(("training", "trainer", "devices"))
    'training.trainer.devices'
    """
    return ".".join(key)


def spliced(text: str, splices: Iterable[Splice]) -> str:
    """Replace stretches of a text, which do not overlap."""
    # From the end, so that places stay; of two insertions at one place the first comes first.
    ordered = sorted(splices, key=lambda each: (each.start, each.end))
    for splice in reversed(ordered):
        text = text[: splice.start] + splice.text + text[splice.end :]
    return text


def line_of(text: str, position: int) -> int:
    """Count the line that a character is in, from one."""
    return text.count("\n", 0, position) + 1


def line_break_of(text: str) -> str:
    """Return the line break that a text uses, by its first."""
    first = text.find("\n")
    return "\r\n" if first > 0 and text[first - 1] == "\r" else "\n"


def expected_values(
    tree: Tree, replaced: Mapping[Key, Value], inserted: Sequence[Insertion]
) -> dict[Key, Scalar]:
    """Return what an edited file must say: the intended values changed, and no other."""
    values = tree.values()
    for key, value in [*replaced.items(), *((each.key, each.value) for each in inserted)]:
        if isinstance(value, dict):
            values |= {(*key, name): part for name, part in value.items()}
        else:
            values[key] = value
    return values


def same_values(first: Mapping[Key, Scalar], second: Mapping[Key, Scalar]) -> bool:
    """Compare what two files say; 1, 1.0 and true are three different things."""
    return first.keys() == second.keys() and all(
        type(first[key]) is type(second[key]) and first[key] == second[key] for key in first
    )
