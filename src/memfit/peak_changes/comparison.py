"""Compares two sides: how much the peak moved, and which lines and modules moved it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from functools import cached_property
from typing import Any

from .moments import Held, KnownLine, Moment
from .parts import PartChange, kind_of, largest_changes, part_changes, rolled_up
from .sides import Kind, Side

_MEASURED_FRACTION = 0.01
"""What a measured peak may differ by from run to run."""
_ALIKE = 0.6
"""How alike two lines are of which one was edited: of all characters, those they share in order."""
_MOST_LINES, _MOST_OTHERS = 500, 50
"""How many lines are held against how many others of their function."""
_SHORT = len("x = f(x)")
"""A line no longer than this is found anywhere."""
_Key = Callable[["_CodeGroup"], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """By how much a peak may rise; ``fraction`` of the peak before, or bytes."""

    num_bytes: int = 0
    fraction: float = 0.0

    def bytes_above(self, peak_bytes: int) -> int:
        """Return the bytes that may be added to a peak."""
        return self.num_bytes + int(self.fraction * peak_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChange:
    """What a line of code holds more or less at the peak.

    ``source_line`` is that of the version compared; of the one before where the line is gone, and
    empty for what no line stands behind: there ``modules`` name what it is.
    """

    source_line: str
    function: str
    code: str
    code_before: str
    """The line that was edited; empty where it was not."""
    is_new: bool
    """Whether the version before has no such line."""
    is_gone: bool
    """Whether the version after has none."""
    before_bytes: int
    after_bytes: int
    by_category: Mapping[str, int]
    """The changes in bytes."""
    modules: Sequence[PartChange]
    """The changes in bytes, modules of one kind together."""

    @property
    def change_bytes(self) -> int:
        """Return what came; below zero, what went."""
        return self.after_bytes - self.before_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "source_line": self.source_line,
            "function": self.function,
            "code": self.code,
            "code_before": self.code_before,
            "is_new": self.is_new,
            "is_gone": self.is_gone,
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "change_bytes": self.change_bytes,
            "by_category": dict(self.by_category),
            "by_module": [module.to_json("module") for module in self.modules],
        }


class Verdict(StrEnum):
    """Say what became of the peak."""

    HIGHER = "higher"
    WITHIN_TOLERANCE = "within tolerance"
    """Higher, by no more than it may be."""
    SAME = "same"
    LOWER = "lower"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two sides, and what a limit on the second says."""

    before: Side
    after: Side
    tolerance: Tolerance
    budget_bytes: int | None = None
    """The budget that the second has to fit; None: that which each was predicted with."""
    budget_of: str | None = None

    @property
    def change_bytes(self) -> int:
        """Return by how much the peak rises."""
        return self.after.peak_bytes - self.before.peak_bytes

    @property
    def change_fraction(self) -> float | None:
        """Return the same as a part of the peak before; None where that is nothing."""
        before_bytes = self.before.peak_bytes
        return self.change_bytes / before_bytes if before_bytes else None

    @property
    def tolerance_bytes(self) -> int:
        """Return how much it may rise."""
        return self.tolerance.bytes_above(self.before.peak_bytes)

    @property
    def verdict(self) -> Verdict:
        """Return what became of the peak."""
        if self.change_bytes > self.tolerance_bytes:
            return Verdict.HIGHER
        if self.change_bytes > 0:
            return Verdict.WITHIN_TOLERANCE
        return Verdict.LOWER if self.change_bytes < 0 else Verdict.SAME

    @property
    def bounded(self) -> str:
        """Return what the budget bounds."""
        return self.budget_of or self.after.budget_of

    def fits(self, side: Side) -> bool | None:
        """Return whether a side fits the budget; None where there is none."""
        if self.budget_bytes is None:
            return side.fits
        return side.bounded_bytes(self.bounded) <= self.budget_bytes

    @property
    def fits_no_more(self) -> bool:
        """Return whether the second breaks a budget that was given, or that the first keeps."""
        broken = self.fits(self.after) is False
        return broken and (self.budget_bytes is not None or self.fits(self.before) is True)

    @property
    def is_regression(self) -> bool:
        """Return whether continuous integration should refuse the second."""
        return self.verdict is Verdict.HIGHER or self.fits_no_more

    @cached_property
    def moments(self) -> tuple[Moment, Moment] | None:
        """Return the two moments whose blocks are compared; None where they are not known of both.

        That of the second's peak, and the highest moment of the same phase of the first: where the
        peak moves to another phase, other blocks live there, whatever was changed.
        """
        before, after = self.before.moments, self.after.moments
        if before is None or after is None:
            return None
        moment = after.highest
        return before.moment(moment.phase) or before.highest, moment

    @cached_property
    def lines(self) -> Sequence[LineChange] | None:
        """Return the lines that hold more or less, the largest change first; None if not known."""
        before, after = self.before.moments, self.after.moments
        if self.moments is None or before is None or after is None:
            return None
        held = [moment.by_line() for moment in self.moments]
        without = [each.pop("", Counter()) for each in held]
        found = [_line_change(pair) for pair in matched(before.lines, after.lines, *held)]
        found += _without_line(*without)
        return sorted(
            (change for change in found if change.change_bytes),
            key=lambda c: (-abs(c.change_bytes), -c.change_bytes, c.source_line, c.code),
        )

    @cached_property
    def modules(self) -> Sequence[PartChange]:
        """Return the modules that hold more or less, those of one kind together."""
        parts = [side.by_module for side in (self.before, self.after)]
        if self.moments is not None:
            parts = [moment.by_module() for moment in self.moments]
        return rolled_up(part_changes(*parts)) if all(parts) else ()

    @cached_property
    def categories(self) -> Sequence[PartChange]:
        """Return all categories, those that changed most first."""
        parts = [side.by_category for side in (self.before, self.after)]
        if self.moments is not None:
            parts = [moment.by_category() for moment in self.moments]
        return largest_changes(part_changes(*parts)) if all(parts) else ()

    @cached_property
    def phases(self) -> Sequence[PartChange]:
        """Return the peak of each phase that both have."""
        shared = [phase for phase in self.after.peaks if phase in self.before.peaks]
        before, after = (
            {phase: side.peaks[phase] for phase in shared} for side in (self.before, self.after)
        )
        return part_changes(before, after)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        fits = {"before": self.fits(self.before), "after": self.fits(self.after)}
        return {
            "verdict": self.verdict.value,
            "is_regression": self.is_regression,
            "fits": fits["after"],
            "fitted_before": fits["before"],
            "budget_bytes": self.budget_bytes,
            "change_bytes": self.change_bytes,
            "change_fraction": self.change_fraction,
            "tolerance_bytes": self.tolerance_bytes,
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "by_line": None if self.lines is None else [line.to_json() for line in self.lines],
            "by_module": [row.to_json("module") for row in self.modules],
            "by_category": [row.to_json("category") for row in self.categories],
            "by_phase": [row.to_json("phase") for row in self.phases],
        }


def default_tolerance(before: Side, after: Side) -> Tolerance:
    """Return nothing between predictions, which repeat to the byte, and 1 % where one measured."""
    is_measured = Kind.MEASURED in (before.kind, after.kind)
    return Tolerance(fraction=_MEASURED_FRACTION if is_measured else 0.0)


def _line_change(pair: Pair) -> LineChange:
    before, after = pair
    shown = after or before
    assert shown is not None, "a pair has one at least"
    held = [Counter() if group is None else group.held for group in pair]
    was_edited = before is not None and after is not None and before.code != after.code
    return LineChange(
        source_line=shown.source_line,
        function=shown.function,
        code=shown.code,
        code_before=before.code if was_edited and before is not None else "",
        is_new=before is None,
        is_gone=after is None,
        before_bytes=held[0].total(),
        after_bytes=held[1].total(),
        by_category=_changed_categories(*held),
        modules=rolled_up(part_changes(_by_module(held[0]), _by_module(held[1]))),
    )


def _without_line(before: Held, after: Held) -> Iterator[LineChange]:
    """Yield the changes of what no line stands behind, a kind of modules at a time."""
    for row in rolled_up(part_changes(_by_module(before), _by_module(after))):
        its_own = [_of_module(row.name, each) for each in (before, after)]
        yield LineChange(
            source_line="",
            function="",
            code="",
            code_before="",
            is_new=False,
            is_gone=False,
            before_bytes=row.before_bytes,
            after_bytes=row.after_bytes,
            by_category=_changed_categories(*its_own),
            modules=[row],
        )


def _of_module(name: str, held: Held) -> Held:
    """Keep what is held in a module, or in modules of a kind."""
    return Counter({key: held[key] for key in held if name in (key[0], kind_of(key[0]))})


def _changed_categories(before: Held, after: Held) -> dict[str, int]:
    """Return how much of each category came or went, the largest change first."""
    changes: Counter[str] = Counter()
    for sign, held in ((-1, before), (1, after)):
        for (_, category), num_bytes in held.items():
            changes[category] += sign * num_bytes
    ordered = sorted(changes.items(), key=lambda change: -abs(change[1]))
    return {category: num_bytes for category, num_bytes in ordered if num_bytes}


def _by_module(held: Held) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (module, _), num_bytes in held.items():
        found[module] += num_bytes
    return found


@dataclass(slots=True, eq=False)
class _CodeGroup:
    """Lines of one function that read the same, and what they hold together.

    A line that only moved is the same line. One that was edited is paired with what stood in the
    same function and reads alike, so that a renamed variable is no change of memory.
    """

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


Pair = tuple[_CodeGroup | None, _CodeGroup | None]


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


def _groups(lines: Iterable[KnownLine], held: Mapping[str, Held]) -> list[_CodeGroup]:
    """Put lines together that read the same in one function; each without its text stays alone."""
    groups: dict[Hashable, _CodeGroup] = {}
    known = {line.source_line: line for line in lines}
    unknown = (name for name in held if name and name not in known)
    untold = [KnownLine(source_line=name, function="", code="") for name in unknown]
    for line in (*known.values(), *untold):
        group = _CodeGroup(line.source_line.rpartition(":")[0], line.function, line.code)
        key = group.file, line.function, line.code or line.source_line
        group = groups.setdefault(key, group)
        group.source_lines.append(line.source_line)
        group.held.update(held.get(line.source_line, {}))
    return list(groups.values())


def _in_file(group: _CodeGroup) -> Hashable:
    return group.file, group.function, group.code or group.source_line


def _in_file_of_that_name(group: _CodeGroup) -> Hashable:
    """Look past the folder: two copies of a repository are in folders of different names."""
    name = group.file.rpartition("/")[2]
    return name, group.function, group.code or group.source_line.rpartition("/")[2]


def _text_elsewhere(group: _CodeGroup) -> Hashable:
    """Look past file and function, for code that was moved."""
    return group.code if len(group.code) > _SHORT else None


def _equal_by(key: _Key, old: list[_CodeGroup], new: list[_CodeGroup]) -> list[Pair]:
    """Take the groups out of both lists that are alone there with their key."""
    found = _by(key, new)
    pairs: list[Pair] = [
        (groups[0], found[each][0])
        for each, groups in _by(key, old).items()
        if each is not None and len(groups) == len(found.get(each, [])) == 1
    ]
    _take(pairs, old, new)
    return pairs


def _take(pairs: Iterable[Pair], *lists: list[_CodeGroup]) -> None:
    """Take the groups of pairs out of lists."""
    taken = {id(group) for pair in pairs for group in pair}
    for groups in lists:
        groups[:] = [group for group in groups if id(group) not in taken]


def _by(key: _Key, groups: Iterable[_CodeGroup]) -> dict[Hashable, list[_CodeGroup]]:
    found: dict[Hashable, list[_CodeGroup]] = {}
    for group in groups:
        found.setdefault(key(group), []).append(group)
    return found


def _edited(old: list[_CodeGroup], new: list[_CodeGroup]) -> list[Pair]:
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


def _function_of(group: _CodeGroup) -> Hashable:
    return group.file.rpartition("/")[2], group.function
