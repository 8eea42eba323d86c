"""Parts of two peaks beside each other: categories, modules, phases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number between dots: the place of a module in a list of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartChange:
    """A part of the peak, in both."""

    name: str
    before_bytes: int
    after_bytes: int
    num_members: int = 1
    """How many parts of one pattern changed."""

    @property
    def change_bytes(self) -> int:
        """Return what came; below zero, what went."""
        return self.after_bytes - self.before_bytes

    def to_json(self, what: str) -> dict[str, Any]:
        """Return plain JSON values, with the name under what it names."""
        return {
            what: self.name,
            "num_members": self.num_members,
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "change_bytes": self.change_bytes,
        }


def part_changes(before: Mapping[str, int], after: Mapping[str, int]) -> list[PartChange]:
    """Set the parts of two peaks beside each other, in their own order, without the empty ones."""
    rows = [
        PartChange(name=name, before_bytes=before.get(name, 0), after_bytes=after.get(name, 0))
        for name in dict.fromkeys((*before, *after))
    ]
    return [row for row in rows if row.before_bytes or row.after_bytes]


def kind_of(module: str) -> str:
    """Return the pattern of a module's name: ``h.*.mlp`` for ``h.0.mlp``."""
    return _NUMBER.sub("*", module)


def rolled_up(rows: Iterable[PartChange]) -> list[PartChange]:
    """Return the modules that changed, the largest change first; ``h.0.mlp`` and on as ``h.*.mlp``.

    A module that alone of its kind changed keeps its name.
    """
    kinds: dict[str, list[PartChange]] = {}
    for row in rows:
        kinds.setdefault(kind_of(row.name), []).append(row)
    rolled = []
    for pattern, members in kinds.items():
        changed = [row for row in members if row.change_bytes]
        if len(changed) == 1:
            rolled += changed
        elif changed:
            rolled.append(
                PartChange(
                    name=pattern,
                    before_bytes=sum(row.before_bytes for row in members),
                    after_bytes=sum(row.after_bytes for row in members),
                    num_members=len(changed),
                )
            )
    return largest_changes(rolled)


def largest_changes(rows: Iterable[PartChange]) -> list[PartChange]:
    """Order by how much came or went; what came first among equals."""
    return sorted(rows, key=lambda row: (-abs(row.change_bytes), -row.change_bytes, row.name))


def rest_of(rows: Sequence[PartChange], limit: int) -> PartChange | None:
    """Add up the rows past a limit; None where there are none."""
    rest = rows[limit:]
    if not rest:
        return None
    return PartChange(
        name=f"({len(rest)} others)",
        before_bytes=sum(row.before_bytes for row in rest),
        after_bytes=sum(row.after_bytes for row in rest),
    )
