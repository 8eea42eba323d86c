"""Compares two sides: how much the peak moved, and which lines and modules moved it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from .line_matching import Pair, matched
from .moments import Held, Moment
from .parts import PartChange, kind_of, largest_changes, part_changes, rolled_up
from .sides import Kind, Side

_MEASURED_FRACTION = 0.01
"""What a measured peak may differ by from run to run."""


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
