"""What a look at a job's state finds: what has changed, and what cannot be put back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class ChangeKind(StrEnum):
    """How something changed."""

    TENSOR = "tensor"
    """A tensor's or an array's content, shape, dtype or requires_grad."""
    ATTRIBUTE = "attribute"
    """A plain value: a number, a string, None."""
    CONTAINER = "container"
    """What a list, dict, set or the like holds."""
    GENERATOR = "generator"
    """The state of a generator of random numbers."""
    BINDING = "binding"
    """A name that now means another object."""
    HOOK = "hook"
    """A hook that came or went."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs from a snapshot."""

    owner: str
    """What holds it: ``model.encoder.norm``, ``optimizer``, ``loss``, a module of Python code."""
    name: str
    kind: ChangeKind
    detail: str = ""
    """What it was and what it is, where that can be said in a few words."""
    evidence: str = field(default="", compare=False, repr=False)
    """All that it was and is, to be compared with another change; empty where not all is plain."""

    @property
    def full_name(self) -> str:
        """Name owner and thing as one would write it."""
        return full_name(self.owner, self.name)

    def __str__(self) -> str:
        return f"{self.full_name}: {self.detail}" if self.detail else self.full_name


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something that can be reached and changed, but not put back."""

    owner: str
    kind: str
    """``file``, ``iterator``, ``lock``, ``socket``, ``extension``, ``size`` …"""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


class Place(NamedTuple):
    """Where something is held: by what, and under which name."""

    owner: str
    name: str = ""

    @property
    def text(self) -> str:
        """Return both as one would write it."""
        return full_name(self.owner, self.name)

    def attribute(self, name: str) -> Place:
        """Return the place of an attribute of what lies here."""
        return Place(full_name(self.owner, self.name), name)

    def item(self, key: Any) -> Place:
        """Return the place of an item of the container that lies here."""
        return Place(self.owner, f"{self.name}[{short(key)}]")


def full_name(owner: str, name: str) -> str:
    """Join an owner and a name: an attribute after a dot, an item without one."""
    if not name:
        return owner
    return f"{owner}{name}" if name.startswith(("[", " ")) or not owner else f"{owner}.{name}"


PLAIN_TYPES = frozenset((int, float, bool, complex, str, bytes, type(None)))
"""The types of values that hold nothing that could change."""
_MOST_CHARACTERS = 40


def short(value: Any) -> str:
    """Show a value in a few characters, without asking objects that are not plain."""
    if type(value) is tuple:
        inside = ", ".join(map(short, value[:3])) + (", …" if len(value) > 3 else "")
        return f"({inside})"
    if type(value) not in PLAIN_TYPES:
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def is_plain(value: Any) -> bool:
    """Return whether a value holds nothing that could change."""
    return type(value) in PLAIN_TYPES or (type(value) is tuple and all(map(is_plain, value)))


def is_same(old: Any, new: Any) -> bool:
    """Return whether two values are one object, or plain and equal to the bit.

    Objects that are not plain are never asked: their ``__eq__`` may do anything.
    """
    if old is new:
        return True
    return type(old) is type(new) and is_plain(old) and is_plain(new) and repr(old) == repr(new)
