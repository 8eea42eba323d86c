"""Rolls modules of one kind up: ``h.*.mlp.c_fc``, twelve times, instead of twelve lines.

Pure data: bytes by module in, a tree of groups out. Terminal, pages and comparisons draw it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memfit.units import format_bytes, in_unit_of

ANY = "*"
"""Stands for the numbers of modules in a list."""
ITSELF = " (itself)"
STEP = "(step)"
"""The name of what belongs to no module."""

_Name = tuple[str, ...]
_MUCH = 4
"""A group is worth unfolding that holds one in so many of all bytes."""
_ALIKE = 0.01
"""Sizes that differ by no more than this share are one figure: a card cuts blocks unevenly."""
_FEWEST_ALIKE = 3
"""Members of a list that hold equal bytes and nothing below them, to be taken for one kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroup:
    """Modules whose names differ in numbers alone, with all that lies in them."""

    name: str
    """The one module's name, or with ``*`` in the place of each number that differs."""
    num_modules: int
    total_bytes: int
    lowest_bytes: int
    """Of a single module, as ``highest_bytes``."""
    highest_bytes: int
    below: tuple[ModuleGroup, ...] = ()
    """What it is made of, the largest first; empty where there is nothing to unfold."""

    @property
    def each(self) -> str:
        """Write how many modules hold how much each; empty for a single one."""
        if self.num_modules == 1:
            return ""
        highest = format_bytes(self.highest_bytes)
        lowest = in_unit_of(self.lowest_bytes, self.highest_bytes)
        if lowest == highest.partition(" ")[0]:
            figure = highest
        elif self.highest_bytes - self.lowest_bytes <= _ALIKE * self.highest_bytes:
            figure = f"about {format_bytes(self.total_bytes / self.num_modules)}"
        else:
            figure = f"{lowest} to {highest}"
        return f"{self.num_modules} x {figure}"


def rolled_up(by_module: Mapping[str, int]) -> tuple[ModuleGroup, ...]:
    """Return the outermost groups of modules, the largest first.

    The bytes of all groups add up to those given, and those below a group to the group's own.

    Args:
        by_module: bytes by the full names of modules; the empty name is the step itself.

    >>> [group] = rolled_up({"h.0.fc": 4, "h.1.fc": 4})
    >>> group.name, group.each
    ('h.*.fc', '2 x 4 B')
    """
    found = {tuple(name.split(".")): size for name, size in by_module.items() if name and size}
    groups = list(_groups((), _patterns(found), found))
    if of_step := by_module.get("", 0):
        groups.append(_group(STEP, [of_step]))
    return _largest_first(groups)


def unfolded(groups: Sequence[ModuleGroup], most_rows: int) -> list[ModuleGroup]:
    """Unfold the largest groups in turn as long as there are no more rows than wanted.

    One that holds much is unfolded all the same. What gets no row is added up in the last one.
    """
    rows = list(groups)
    much = sum(group.total_bytes for group in groups) / _MUCH
    while len(rows) <= most_rows:
        candidates = (
            row
            for row in rows
            if row.below
            and (len(rows) + len(row.below) - 1 <= most_rows or row.total_bytes >= much)
        )
        largest = max(candidates, key=lambda row: row.total_bytes, default=None)
        if largest is None:
            break
        rows.remove(largest)
        rows += largest.below
    rows = list(_largest_first(rows))
    if len(rows) <= most_rows:
        return rows
    kept, rest = rows[: most_rows - 1], rows[most_rows - 1 :]
    num_modules = sum(row.num_modules for row in rest)
    return [*kept, _group(f"({num_modules} others)", [sum(row.total_bytes for row in rest)])]


def down_to(groups: Sequence[ModuleGroup], depth: int) -> Iterator[tuple[int, ModuleGroup]]:
    """Yield groups with their level, 0 outermost, each before what it is made of."""
    for group in groups:
        yield 0, group
        if depth > 1:
            yield from ((level + 1, below) for level, below in down_to(group.below, depth - 1))


def _patterns(found: Mapping[_Name, int]) -> dict[_Name, _Name]:
    """Give each name its pattern: a star in the place of numbers that differ within a kind."""
    parents = {name[:end] for name in found for end in range(1, len(name))}
    kinds: defaultdict[_Name, list[_Name]] = defaultdict(list)
    for name in found:
        # A number at the end tells layers of a sequence apart, where nothing lies below them.
        num_starred = len(name) - (name not in parents)
        starred = (ANY if part.isdigit() else part for part in name[:num_starred])
        kinds[(*starred, *name[num_starred:])].append(name)
    _join_alike_leaves(kinds, found)
    patterns: dict[_Name, _Name] = {}
    for kind, names in kinds.items():
        pattern = tuple(
            names[0][place] if len({name[place] for name in names}) == 1 else part
            for place, part in enumerate(kind)
        )
        patterns |= dict.fromkeys(names, pattern)
    return patterns


def _join_alike_leaves(kinds: dict[_Name, list[_Name]], found: Mapping[_Name, int]) -> None:
    """Take members of a list for one kind that have nothing below them and hold equal bytes."""
    lists: defaultdict[_Name, list[_Name]] = defaultdict(list)
    for kind in kinds:
        if kind[-1].isdigit():
            lists[kind[:-1]].append(kind)
    for stem, members in lists.items():
        sizes = {found[name] for kind in members for name in kinds[kind]}
        if len(members) >= _FEWEST_ALIKE and len(sizes) == 1:
            kinds[(*stem, ANY)] = [name for kind in members for name in kinds.pop(kind)]


def _groups(
    stem: _Name, patterns: Mapping[_Name, _Name], found: Mapping[_Name, int]
) -> Iterator[ModuleGroup]:
    """Yield what lies right below a pattern; a single thing in the way is passed over."""
    place = len(stem)
    inside: defaultdict[_Name, list[_Name]] = defaultdict(list)
    for name, pattern in patterns.items():
        if len(pattern) > place and pattern[:place] == stem:
            inside[pattern[: place + 1]].append(name)
    for prefix, names in inside.items():
        mine = {name: patterns[name] for name in names}
        own = [name for name in names if len(name) == place + 1]
        below = list(_groups(prefix, mine, found))
        if not own and len(below) == 1:
            yield below[0]
            continue
        each: defaultdict[_Name, int] = defaultdict(int)
        for name in names:
            each[name[: place + 1]] += found[name]
        if own and below:
            below.append(_group(".".join(prefix) + ITSELF, [found[name] for name in own]))
        yield _group(".".join(prefix), list(each.values()), _largest_first(below))


def _group(name: str, sizes: Sequence[int], below: tuple[ModuleGroup, ...] = ()) -> ModuleGroup:
    return ModuleGroup(
        name=name,
        num_modules=len(sizes),
        total_bytes=sum(sizes),
        lowest_bytes=min(sizes),
        highest_bytes=max(sizes),
        below=below,
    )


def _largest_first(groups: Sequence[ModuleGroup]) -> tuple[ModuleGroup, ...]:
    return tuple(sorted(groups, key=lambda group: (-group.total_bytes, group.name)))
