"""The part of a recorded step that matters: one forward and its backward, with their totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from memfit.allocator.simulate import AllocatorRules
from memfit.trace.events import Category, ModuleCall, Operation, Phase, Trace


@dataclass(frozen=True, slots=True)
class _Range:
    """Half-open ranges of operations: a forward and the backward after it."""

    first: int
    backward: int
    last: int


class ForwardBackward:
    """The forward and backward of the micro-batch with the highest total."""

    def __init__(self, trace: Trace, rules: AllocatorRules, ranges: Sequence[_Range]) -> None:
        self._trace = trace
        self._sizes = [rules.rounded(allocation.num_bytes) for allocation in trace.allocations]
        self._totals = totals(trace, self._sizes)
        self._events = [operation.first_event for operation in trace.operations]
        self._born, self._freed = _lives(trace)
        self._place = max(ranges, key=self._highest_in)
        self._others = [place for place in ranges if place is not self._place]

    def repeats(self, seconds_of: Callable[[Operation], float]) -> float:
        """Return how often the forward is computed, counting smaller micro-batches in part."""
        operations = self._trace.operations
        seconds = [
            sum(seconds_of(operation) for operation in operations[place.first : place.backward])
            for place in (self._place, *self._others)
        ]
        return sum(seconds) / seconds[0] if seconds[0] else float(len(seconds))

    @property
    def peak_bytes(self) -> int:
        """Return the highest total of the whole step."""
        return max(self._totals, default=0)

    @property
    def backward_begin(self) -> int:
        """Return the event with which backward begins."""
        return self._event_of(self._place.backward)

    def operations(self, call: ModuleCall) -> list[Operation]:
        """Return the operators of a call."""
        return self._trace.operations[call.first_operation : call.last_operation]

    def forward_calls(self) -> Iterator[ModuleCall]:
        """Yield the calls of modules in the forward."""
        for call in self._trace.calls:
            if (
                self._place.first <= call.first_operation
                and (call.last_operation <= self._place.backward)
                and call.phase is Phase.FORWARD
            ):
                yield call

    def last_reads(self) -> dict[int, int]:
        """Give, for each allocation, the last operator of the forward that reads it."""
        operations = self._trace.operations
        return {
            index: place
            for place in range(self._place.first, self._place.backward)
            for index in operations[place].reads
        }

    def first_reads(self) -> dict[int, int]:
        """Give, for each allocation, the first operator of the forward that reads it."""
        operations = self._trace.operations
        return {
            index: place
            for place in reversed(range(self._place.first, self._place.backward))
            for index in operations[place].reads
        }

    def changed(self) -> frozenset[int]:
        """Return the allocations that an operator of the forward changes in place."""
        operations = self._trace.operations[self._place.first : self._place.backward]
        return frozenset(index for operation in operations for index in operation.changes)

    def reads_in_backward(self) -> dict[int, list[int]]:
        """Give, for each allocation, the events with which operators of the backward read it."""
        found: dict[int, list[int]] = {}
        for place in range(self._place.backward, self._place.last):
            for index in self._trace.operations[place].reads:
                found.setdefault(index, []).append(self._events[place])
        return found

    def is_made_by(self, index: int, call: ModuleCall) -> bool:
        """Return whether an allocation was made inside a call."""
        first, last = self.forward_of(call)
        return first <= self._born[index] < last

    def is_saved(self, index: int) -> bool:
        """Return whether an allocation was made in the forward and lives on into the backward."""
        allocation = self._trace.allocations[index]
        return allocation.category is Category.SAVED_ACTIVATIONS and self._freed[index] > (
            self.backward_begin
        )

    def is_scratch(self, index: int) -> bool:
        """Return whether an allocation ends before the next operator begins."""
        return self._freed[index] <= self._born[index] + 1

    def is_made_in_forward(self, index: int) -> bool:
        """Return whether an allocation was made in the forward."""
        born = self._born[index]
        return self._event_of(self._place.first) <= born < self.backward_begin

    def num_bytes(self, indices: Iterable[int]) -> int:
        """Add up allocations, rounded as the allocator does."""
        return sum(self._sizes[index] for index in set(indices))

    def total(self, event: int) -> int:
        """Return the total before an event."""
        return self._totals[event - 1] if event > 0 else 0

    def highest(self, first: int, last: int) -> int:
        """Return the highest total from before one event to before another."""
        return max(self.total(first), *self._totals[first:last], 0)

    def highest_outside(self, first: int, last: int) -> int:
        """Return the highest total of the step but for what lies between two events.

        Other micro-batches are left out: whatever is done about this one is done about them.
        """
        events = set(range(len(self._totals))).difference(range(first, last))
        for other in self._others:
            events.difference_update(range(*self._events_of(other)))
        return max((self._totals[event] for event in events), default=0)

    def forward_of(self, call: ModuleCall) -> tuple[int, int]:
        """Return the events of a call."""
        return self._event_of(call.first_operation), self._event_of(call.last_operation)

    def backward_of(self, name: str, inner: Iterable[int], begin: int) -> tuple[int, int]:
        """Return the events of a module's backward, none of them before a given one.

        They begin with the first allocation for the module, or with the first of its saved
        allocations that is freed; they end with the last.
        """
        end = self._event_of(self._place.last)
        places = [
            self._born[index]
            for index, allocation in enumerate(self._trace.allocations)
            if allocation.phase is Phase.BACKWARD
            and (allocation.module == name or allocation.module.startswith(f"{name}."))
            and begin <= self._born[index] < end
        ]
        places += [place for index in inner if begin <= (place := self._freed[index]) < end]
        if not places:
            return begin, begin
        return min(places), max(places) + 1

    def _highest_in(self, place: _Range) -> int:
        first, last = self._events_of(place)
        return max(self._totals[first:last], default=0)

    def _events_of(self, place: _Range) -> tuple[int, int]:
        return self._event_of(place.first), self._event_of(place.last)

    def _event_of(self, operation: int) -> int:
        """Return the first event that belongs to an operator or comes after it."""
        return self._events[operation] if operation < len(self._events) else len(self._totals)


def highest_forward_backward(trace: Trace, rules: AllocatorRules) -> ForwardBackward | None:
    """Find the forward and backward with the highest total; None if nothing is differentiated."""
    ranges = list(_ranges(trace))
    return ForwardBackward(trace, rules, ranges) if ranges else None


def totals(trace: Trace, sizes: list[int]) -> list[int]:
    """Return the total after each event."""
    current = 0
    found = []
    for event in trace.events:
        current += sizes[event] if event >= 0 else -sizes[-1 - event]
        found.append(current)
    return found


def _ranges(trace: Trace) -> Iterator[_Range]:
    """Yield every forward that is followed by a backward."""
    phases = [operation.phase for operation in trace.operations]
    first = backward = None
    for place, phase in enumerate([*phases, None]):
        if backward is not None and phase is not Phase.BACKWARD:
            assert first is not None, "a backward follows a forward"
            yield _Range(first, backward, place)
            first = backward = None
        if phase is Phase.FORWARD and first is None:
            first = place
        elif phase is Phase.BACKWARD and first is not None and backward is None:
            backward = place


def _lives(trace: Trace) -> tuple[list[int], list[int]]:
    """Return the event at which each allocation is made, and the one at which it is freed."""
    never = len(trace.events)
    born, freed = [0] * len(trace.allocations), [never] * len(trace.allocations)
    for place, event in enumerate(trace.events):
        if event >= 0:
            born[event] = place
        else:
            freed[-1 - event] = place
    return born, freed
