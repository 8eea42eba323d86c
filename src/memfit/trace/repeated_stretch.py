"""Copies a stretch of a trace to where the trace ends now, as if the same had been done again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from memfit.trace.abridgement import counted
from memfit.trace.events import Allocation, Category, Extra, ModuleCall, Operation, Trace
from memfit.trace.repetition import ForwardStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How much of everything a history has at some time."""

    allocation: int
    event: int
    operation: int
    call: int
    release: int
    extra: int
    start: int
    counts: tuple[int, int, int]
    """Of what is abridged; see ``trace.abridgement``."""

    @classmethod
    def at_end_of(cls, history: Trace, starts: Sequence[ForwardStart]) -> Self:
        """Return where a history ends now."""
        return cls(
            allocation=len(history.allocations),
            event=len(history.events),
            operation=len(history.operations),
            call=len(history.calls),
            release=len(history.releases),
            extra=len(history.extras),
            start=len(starts),
            counts=counted(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of a history, and where the step that it belongs to begins."""

    step: Place
    begin: Place
    end: Place


@dataclass(slots=True, kw_only=True)
class Copy:
    """What a stretch adds to the history when it happens again."""

    names: Mapping[int, int]
    """What stands for an allocation of the stretch, or of its step before it."""
    allocations: list[Allocation]
    events: list[int]
    operations: list[Operation]
    calls: list[ModuleCall]
    releases: list[int]
    extras: list[Extra]
    starts: list[ForwardStart]

    def is_what_was_done(
        self, history: Trace, starts: Sequence[ForwardStart], stretch: Stretch
    ) -> bool:
        """Return whether a later stretch is this copy, event by event."""
        begin, end = stretch.begin, stretch.end
        return (
            self.allocations == history.allocations[begin.allocation : end.allocation]
            and self.events == history.events[begin.event : end.event]
            and self.operations == history.operations[begin.operation : end.operation]
            and self.calls == history.calls[begin.call : end.call]
            and self.releases == history.releases[begin.release : end.release]
            and self.extras == history.extras[begin.extra : end.extra]
            and self.starts == list(starts[begin.start : end.start])
        )

    def append_to(self, history: Trace, starts: list[ForwardStart]) -> None:
        """Add the copy to the history."""
        history.allocations += self.allocations
        history.events += self.events
        history.operations += self.operations
        history.calls += self.calls
        history.releases += self.releases
        history.extras += self.extras
        starts += self.starts


def left_by(history: Trace, stretch: Stretch) -> list[int] | None:
    """Return what a stretch has made and not ended, but for workspaces, which are kept for good.

    None if it has ended what it did not make: that can end only once.
    """
    own = range(stretch.begin.allocation, stretch.end.allocation)
    left = dict.fromkeys(own)
    for event in history.events[stretch.begin.event : stretch.end.event]:
        if event < 0 and left.pop(-1 - event, -1) is not None:
            return None
    return [index for index in left if not _is_kept(history, index)]


def _is_kept(history: Trace, index: int) -> bool:
    return history.allocations[index].category is Category.WORKSPACES


def copy_of(
    history: Trace, starts: Sequence[ForwardStart], stretch: Stretch, step: Place, begin: Place
) -> Copy | None:
    """Return what a stretch adds if it happens again in another step.

    Args:
        history: that the stretch is part of.
        starts: of forwards in the history.
        stretch: what happens again.
        step: where the other step begins.
        begin: where in it the stretch begins again.

    Returns:
        None if what came before the stretch in its step is not what came before it in the other.
    """
    before = range(stretch.step.allocation, stretch.begin.allocation)
    others = range(step.allocation, begin.allocation)
    here, there = (
        [history.allocations[index].num_bytes for index in each] for each in (before, others)
    )
    if here != there:
        return None
    names = dict(zip(before, others, strict=True))
    own = range(stretch.begin.allocation, stretch.end.allocation)
    copied = [index for index in own if not _is_kept(history, index)]
    names |= dict(zip(copied, range(begin.allocation, begin.allocation + len(copied)), strict=True))
    moved = _Moved(history, stretch, begin, names)
    return Copy(
        names=names,
        allocations=[replace(history.allocations[index]) for index in copied],
        events=list(moved.events()),
        operations=list(moved.operations()),
        calls=list(moved.calls()),
        releases=[
            moved.event(place)
            for place in history.releases[stretch.begin.release : stretch.end.release]
        ],
        extras=[
            replace(extra, allocation=names[extra.allocation])
            for extra in history.extras[stretch.begin.extra : stretch.end.extra]
        ],
        starts=[moved.start(each) for each in starts[stretch.begin.start : stretch.end.start]],
    )


class _Moved:
    """Name everything of a stretch as it is called where the stretch happens again."""

    def __init__(
        self, history: Trace, stretch: Stretch, begin: Place, names: Mapping[int, int]
    ) -> None:
        self._history, self._stretch, self._names = history, stretch, names
        self._begin = begin
        events = history.events[stretch.begin.event : stretch.end.event]
        self._kept = [
            stretch.begin.event + place
            for place, index in enumerate(events)
            if index >= 0 and _is_kept(history, index)
        ]
        self._by_operation = begin.operation - stretch.begin.operation

    def event(self, place: int) -> int:
        """Return where an event is then; workspaces are not made again."""
        return (
            place + self._begin.event - self._stretch.begin.event - bisect_left(self._kept, place)
        )

    def events(self) -> Iterator[int]:
        kept = set(self._kept)
        for place in range(self._stretch.begin.event, self._stretch.end.event):
            if place in kept:
                continue
            event = self._history.events[place]
            yield self._name(event) if event >= 0 else -1 - self._name(-1 - event)

    def operations(self) -> Iterator[Operation]:
        begin, end = self._stretch.begin.operation, self._stretch.end.operation
        for operation in self._history.operations[begin:end]:
            yield replace(
                operation,
                reads=self._all(operation.reads),
                writes=self._all(operation.writes),
                changes=self._all(operation.changes),
                first_event=self.event(operation.first_event),
            )

    def calls(self) -> Iterator[ModuleCall]:
        by = self._by_operation
        for call in self._history.calls[self._stretch.begin.call : self._stretch.end.call]:
            is_open = call.last_operation < 0
            yield replace(
                call,
                first_operation=call.first_operation + by,
                last_operation=call.last_operation + (0 if is_open else by),
            )

    def start(self, each: ForwardStart) -> ForwardStart:
        more_loops = self._begin.counts[2] - self._stretch.begin.counts[2]
        return ForwardStart(
            self.event(each.event),
            each.operation + self._by_operation,
            each.loop + more_loops if each.loop else 0,
        )

    def _all(self, indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._name(index) for index in indices)

    def _name(self, index: int) -> int:
        return self._names.get(index, index)
