"""The recorded step as data: pure Python, no torch, so that it can be saved, sent and replayed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum


class Phase(StrEnum):
    """Name the part of a step in which something happened."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Category(StrEnum):
    """Name what a block of memory is for."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer state"
    SAVED_ACTIVATIONS = "saved activations"
    TEMPORARIES = "temporaries"
    WORKSPACES = "workspaces"
    BATCH = "batch"
    GATHERED_PARAMETERS = "gathered parameters"
    COMMUNICATION = "communication buffers"
    GLOO_STAGING = "gloo staging"


ONLY_AMONG_RANKS = (
    Category.GATHERED_PARAMETERS,
    Category.COMMUNICATION,
    Category.GLOO_STAGING,
)
"""What there is only where several ranks train together; named only where there is any."""


def category_names(allocations: Iterable[Allocation]) -> list[str]:
    """Name the categories of which something is said: all, and those of ranks where they occur."""
    found = {allocation.category for allocation in allocations}
    return [each.value for each in Category if each not in ONLY_AMONG_RANKS or each in found]


@dataclass(slots=True)
class Allocation:
    """One block of memory: how many bytes, and which operator of which module asked for it.

    ``source_line`` is the line of the user's code behind it, as ``file.py:12``, where known.
    ``stream`` is the stream of the card on which it was asked for, 0 being the default one.
    """

    num_bytes: int
    operator: str
    phase: Phase
    module: str
    category: Category
    source_line: str = ""
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Extra:
    """Memory that a kernel takes and gives back inside, of which only bounds are known.

    ``allocation`` is its index in the trace, where it stands with its most likely size.
    """

    allocation: int
    low_bytes: int
    high_bytes: int
    certainty: str
    source: str


@dataclass(slots=True)
class Operation:
    """One executed operator: its floating-point operations and the bytes it reads and writes.

    ``reads``, ``writes`` and ``changes`` are allocations by their index in the trace: what its
    arguments lie in, what was made for its results, and what it changes in place.
    """

    name: str
    phase: Phase
    dtype: str
    num_flops: int
    moved_bytes: int
    signature: int = 0
    """Equal for calls of the same operator on tensors of the same shapes and types."""
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()
    first_event: int = 0
    """How many events of the trace came before it."""
    is_random: bool = False
    """Whether it draws random numbers."""
    sent_bytes: int = 0
    """What a collective sends from this rank."""
    num_ranks: int = 0
    """Of a collective, those that take part; 0 for all other operators."""
    num_nodes: int = 1
    """The machines that they are on."""
    is_on_host: bool = False
    """Whether none of its tensors lies on the device that is recorded, so that the host runs it."""


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: its name and its operations, as a half-open range."""

    module: str
    phase: Phase
    first_operation: int
    last_operation: int = -1


@dataclass(frozen=True, slots=True)
class CodeLine:
    """Where a line of code is: its file, and the function that it is part of."""

    path: str
    function: str
    """As Python qualifies it: ``Block.forward``."""
    number: int


@dataclass(slots=True)
class Trace:
    """A recorded stretch of work: one step, or everything since the model was built.

    ``events`` is the order of things: ``i`` says that allocation ``i`` came to life, ``-1 - i``
    that it was freed. In the trace of one step, allocations that live before it begins come first,
    in phase SETUP.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    """Calls of modules, in the order in which they began."""
    releases: list[int] = field(default_factory=list)
    """Places in ``events`` before which cached memory is given back (``empty_cache``)."""
    lines: dict[str, CodeLine] = field(default_factory=dict)
    """The lines of code that allocations name, by their ``source_line``."""

    def deltas(self) -> Iterator[tuple[int, int]]:
        """Yield ``(allocation index, signed bytes)`` for each event, in order."""
        for event in self.events:
            if event >= 0:
                yield event, self.allocations[event].num_bytes
            else:
                index = -1 - event
                yield index, -self.allocations[index].num_bytes

    def streams(self) -> list[int]:
        """Return the stream of each allocation."""
        return [allocation.stream for allocation in self.allocations]

    @property
    def length(self) -> tuple[int, int]:
        """Return how many allocations and operations there are by now."""
        return len(self.allocations), len(self.operations)

    def rename_phase(self, phase: Phase, *, since: tuple[int, int]) -> None:
        """Give what came after a former ``length`` to another part of the step."""
        num_allocations, num_operations = since
        for allocation in self.allocations[num_allocations:]:
            allocation.phase = phase
        for operation in self.operations[num_operations:]:
            operation.phase = phase

    def flops(self) -> int:
        """Add up the floating-point operations."""
        return sum(operation.num_flops for operation in self.operations)


@dataclass(frozen=True, slots=True)
class StepMark:
    """Where a step lies in a longer trace: its events and operations, as half-open ranges."""

    first_event: int
    last_event: int
    first_operation: int
    last_operation: int


def history_until(history: Trace, mark: StepMark) -> Trace:
    """Cut a longer trace off behind a step."""
    return Trace(
        allocations=history.allocations,
        events=history.events[: mark.last_event],
        operations=history.operations[: mark.last_operation],
        extras=history.extras,
        calls=history.calls,
        releases=[place for place in history.releases if place <= mark.last_event],
        lines=history.lines,
    )


def with_sizes(trace: Trace, sizes: Sequence[int]) -> Trace:
    """Return a trace whose allocations have other sizes, given in their order."""
    allocations = [
        allocation
        if allocation.num_bytes == num_bytes
        else replace(allocation, num_bytes=num_bytes)
        for allocation, num_bytes in zip(trace.allocations, sizes, strict=True)
    ]
    return replace(trace, allocations=allocations)


def allocations_of_step(history: Trace, mark: StepMark) -> list[int]:
    """Return the allocations of ``trace_of_step``, in its order, by their index in the history."""
    before = _alive_after(history.events[: mark.first_event])
    inside = history.events[mark.first_event : mark.last_event]
    return [*before, *(event for event in inside if event >= 0)]


def trace_of_step(history: Trace, mark: StepMark) -> Trace:
    """Cut one step out of a longer trace; what lives when it begins comes first, as SETUP."""
    step = Trace(lines=history.lines)
    place: dict[int, int] = {}

    def add(index: int, allocation: Allocation) -> None:
        place[index] = len(step.allocations)
        step.events.append(len(step.allocations))
        step.allocations.append(allocation)

    for index in _alive_after(history.events[: mark.first_event]):
        add(index, replace(history.allocations[index], phase=Phase.SETUP, operator=""))
    num_events_before = mark.first_event - len(step.events)
    for event in history.events[mark.first_event : mark.last_event]:
        if event >= 0:
            add(event, history.allocations[event])
        else:
            step.events.append(-1 - place[-1 - event])
    step.operations = [
        replace(
            operation,
            reads=tuple(place[index] for index in operation.reads if index in place),
            writes=tuple(place[index] for index in operation.writes if index in place),
            changes=tuple(place[index] for index in operation.changes if index in place),
            first_event=operation.first_event - num_events_before,
        )
        for operation in history.operations[mark.first_operation : mark.last_operation]
    ]
    step.calls = [
        replace(
            call,
            first_operation=call.first_operation - mark.first_operation,
            last_operation=call.last_operation - mark.first_operation,
        )
        for call in history.calls
        if mark.first_operation <= call.first_operation
        and 0 <= call.last_operation <= mark.last_operation
    ]
    step.extras = [
        replace(extra, allocation=place[extra.allocation])
        for extra in history.extras
        if extra.allocation in place
    ]
    return step


def _alive_after(events: list[int]) -> list[int]:
    """Return the allocations that live after some events, oldest first."""
    alive: dict[int, None] = {}
    for event in events:
        if event >= 0:
            alive[event] = None
        else:
            del alive[-1 - event]
    return list(alive)
