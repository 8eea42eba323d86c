"""Lengthens a recorded step whose micro-batches are alike by those that were left out.

Two pieces in the middle are compared, event by event. Where they differ in nothing but the memory
that they made themselves, or that the piece before them has left, every further piece is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Self, TypeVar

from memfit.trace.abridgement import current_loop
from memfit.trace.events import ModuleCall, Operation, StepMark, Trace

T = TypeVar("T")

FEWEST_PIECES = 4
"""One that makes gradients, two that are compared, and one that ends the loop."""


@dataclass(frozen=True, slots=True)
class ForwardStart:
    """Where a forward begins in a longer trace."""

    event: int
    operation: int
    loop: int = 0
    """The loop over pieces that it belongs to, where a step has several."""

    @classmethod
    def at_end_of(cls, history: Trace) -> Self:
        """Mark where a trace goes on."""
        return cls(len(history.events), len(history.operations), current_loop())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """The part of a trace between two forwards: half-open ranges."""

    events: range
    operations: range


def repeated(
    history: Trace,
    marks: Sequence[StepMark],
    starts: Sequence[ForwardStart],
    num_more: int,
) -> tuple[Trace, list[StepMark]] | None:
    """Return a trace and its steps with so many more pieces in each step.

    The new pieces stand between the third and the last one of those that were recorded, in every
    loop over pieces that a step has. A loop that ended after its first piece stays as it is.

    Args:
        history: a trace of several steps.
        marks: where the steps lie in it.
        starts: where forwards begin.
        num_more: how many pieces each step was recorded without.

    Returns:
        None if some step has fewer than four pieces, or if its second and third are not alike.
    """
    repeating = []
    for mark in marks:
        inside = [each for each in starts if mark.first_event <= each.event < mark.last_event]
        loops = [list(loop) for _, loop in groupby(inside, key=lambda each: each.loop)]
        if len(loops) > 1:
            loops = [loop for loop in loops if len(loop) > 1]
        if not loops or min(map(len, loops)) < FEWEST_PIECES:
            return None
        for loop in loops:
            first, second = (
                _Piece(
                    events=range(one.event, two.event),
                    operations=range(one.operation, two.operation),
                )
                for one, two in pairwise(loop[1 - FEWEST_PIECES :])
            )
            if not _Comparison(history, first, second).is_periodic():
                return None
            repeating.append(second)
    lengthening = _Lengthening(history, num_more)
    for piece in repeating:
        lengthening.add_loop(piece)
    lengthening.copy_until(len(history.events), len(history.operations))
    return lengthening.made, [lengthening.moved(mark) for mark in marks]


class _Comparison:
    """Hold two pieces that follow one another beside each other."""

    def __init__(self, history: Trace, first: _Piece, second: _Piece) -> None:
        self._history, self._first, self._second = history, first, second
        self._places: dict[int, tuple[_Piece, int]] = {}
        for piece in (first, second):
            born = (event for event in _of(history.events, piece.events) if event >= 0)
            self._places |= {index: (piece, place) for place, index in enumerate(born)}

    def is_periodic(self) -> bool:
        """Return whether the second piece is the first one again, and leaves what that has left."""
        return (
            len(self._first.events) == len(self._second.events)
            and len(self._first.operations) == len(self._second.operations)
            and all(map(self._same_event, *self._both(self._history.events, "events")))
            and all(map(self._same_operation, *self._both(self._history.operations, "operations")))
            and self._leaves_nothing_for_long()
        )

    def _both(self, items: Sequence[T], kind: str) -> tuple[Sequence[T], Sequence[T]]:
        return _of(items, getattr(self._first, kind)), _of(items, getattr(self._second, kind))

    def _same_event(self, one: int, other: int) -> bool:
        if (one >= 0) != (other >= 0):
            return False
        allocations = self._history.allocations
        if one >= 0:
            return allocations[one] == allocations[other]
        one, other = -1 - one, -1 - other
        is_older = other not in self._places
        # What is there before both pieces can end only once.
        return not is_older and self._same_memory(one, other)

    def _same_memory(self, one: int, other: int) -> bool:
        """Return whether two pieces mean the same by two allocations."""
        here, there = self._places.get(one), self._places.get(other)
        if there is None:
            return one == other
        piece, place = there
        if piece is self._second:
            return here == (self._first, place)
        # What the piece before has left; before the first one that is not compared place by place.
        allocations = self._history.allocations
        return here is None and allocations[one].num_bytes == allocations[other].num_bytes

    def _same_operation(self, one: Operation, other: Operation) -> bool:
        names = ("reads", "writes", "changes")
        bare = [
            replace(each, reads=(), writes=(), changes=(), first_event=each.first_event - begin)
            for each, begin in ((one, self._first.events.start), (other, self._second.events.start))
        ]
        pairs = [(getattr(one, name), getattr(other, name)) for name in names]
        return bare[0] == bare[1] and all(
            len(here) == len(there) and all(map(self._same_memory, here, there))
            for here, there in pairs
        )

    def _leaves_nothing_for_long(self) -> bool:
        """Return whether what the first piece makes has ended when the second one has."""
        ended = {
            -1 - event
            for piece in (self._first, self._second)
            for event in _of(self._history.events, piece.events)
            if event < 0
        }
        return all(
            index in ended for index, (piece, _) in self._places.items() if piece is self._first
        )


class _Lengthening:
    """Copy a trace, and put copies of pieces behind them."""

    def __init__(self, history: Trace, num_more: int) -> None:
        self._history, self._num_more = history, num_more
        self.made = Trace(allocations=list(history.allocations), lines=history.lines)
        self._extra_of = {extra.allocation: extra for extra in history.extras}
        self.made.extras = list(history.extras)
        self._latest: dict[int, int] = {}
        """What stands for an allocation of a piece from the last copy of it on."""
        self._events = self._operations = 0
        self._moves: list[tuple[int, int, int, int]] = []
        """Events and operations from which on all is moved, and how far each."""

    def add_loop(self, piece: _Piece) -> None:
        """Copy everything up to the end of a piece, and the piece so many times more."""
        self.copy_until(piece.events.stop, piece.operations.stop)
        before = len(self.made.events), len(self.made.operations)
        own = [event for event in _of(self._history.events, piece.events) if event >= 0]
        earlier = self._made_by_the_piece_before(piece, len(own))
        current = dict(zip(own, own, strict=True))
        for _ in range(self._num_more):
            renamed = {old: current[new] for old, new in earlier.items()}
            current = dict(zip(own, map(self._copy_of, own), strict=True))
            self._append(piece, {**self._latest, **renamed, **current})
        self._latest |= current
        more = len(self.made.events) - before[0], len(self.made.operations) - before[1]
        self._moves.append((piece.events.stop, piece.operations.stop, *more))

    def _made_by_the_piece_before(self, piece: _Piece, num_own: int) -> dict[int, int]:
        """Return for each allocation of the piece before the one that stands in its place here."""
        size = len(piece.events)
        events = self._history.events
        places = range(piece.events.start - size, piece.events.start)
        before = [event for event in _of(events, places) if event >= 0]
        own = [event for event in _of(events, piece.events) if event >= 0]
        assert len(before) == num_own, "the pieces are alike"
        return dict(zip(before, own, strict=True))

    def _copy_of(self, index: int) -> int:
        copy = len(self.made.allocations)
        self.made.allocations.append(replace(self._history.allocations[index]))
        if index in self._extra_of:
            self.made.extras.append(replace(self._extra_of[index], allocation=copy))
        return copy

    def copy_until(self, event: int, operation: int) -> None:
        """Copy the trace from where it was left to some place."""
        rest = _Piece(
            events=range(self._events, event), operations=range(self._operations, operation)
        )
        self._append(rest, self._latest)
        self._events, self._operations = event, operation

    def _append(self, piece: _Piece, names: dict[int, int]) -> None:
        history, made = self._history, self.made
        by_event = len(made.events) - piece.events.start
        by_operation = len(made.operations) - piece.operations.start
        made.releases += [r + by_event for r in history.releases if r in piece.events]
        made.calls += _moved_calls(history.calls, piece.operations, by_operation)
        for event in _of(history.events, piece.events):
            index = event if event >= 0 else -1 - event
            index = names.get(index, index)
            made.events.append(index if event >= 0 else -1 - index)
        made.operations += [
            replace(
                operation,
                reads=tuple(names.get(each, each) for each in operation.reads),
                writes=tuple(names.get(each, each) for each in operation.writes),
                changes=tuple(names.get(each, each) for each in operation.changes),
                first_event=operation.first_event + by_event,
            )
            for operation in _of(history.operations, piece.operations)
        ]

    def moved(self, mark: StepMark) -> StepMark:
        """Return where a step lies now."""
        first, last = mark.first_event, mark.last_event
        return StepMark(
            first + sum(more for place, _, more, _ in self._moves if place <= first),
            last + sum(more for place, _, more, _ in self._moves if place <= last),
            mark.first_operation
            + sum(more for _, place, _, more in self._moves if place <= mark.first_operation),
            mark.last_operation
            + sum(more for _, place, _, more in self._moves if place <= mark.last_operation),
        )


def _of(items: Sequence[T], places: range) -> Sequence[T]:
    return items[places.start : places.stop]


def _moved_calls(
    calls: Sequence[ModuleCall], operations: range, by_operation: int
) -> Iterator[ModuleCall]:
    """Yield the calls that begin in a range of operations, moved; open ones stay open."""
    for call in calls:
        if call.first_operation in operations:
            is_open = call.last_operation < 0
            yield replace(
                call,
                first_operation=call.first_operation + by_operation,
                last_operation=call.last_operation + (0 if is_open else by_operation),
            )
