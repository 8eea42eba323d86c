"""The recorded step as data: pure Python, no torch, so that it can be saved, sent and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
    BATCH = "batch"


@dataclass(slots=True)
class Allocation:
    """One block of memory: how many bytes, and which operator of which module asked for it."""

    num_bytes: int
    operator: str
    phase: Phase
    module: str
    category: Category


@dataclass(slots=True)
class Operation:
    """One executed operator: its floating-point operations and the bytes it reads and writes."""

    name: str
    phase: Phase
    dtype: str
    num_flops: int
    moved_bytes: int


@dataclass(slots=True)
class Trace:
    """One recorded step.

    ``events`` is the order of things: ``i`` says that allocation ``i`` came to life, ``-1 - i``
    that it was freed. Allocations that live before the step begins come first, in phase SETUP.
    """

    allocations: list[Allocation] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def deltas(self) -> Iterator[tuple[int, int]]:
        """Yield ``(allocation index, signed bytes)`` for each event, in order."""
        for event in self.events:
            if event >= 0:
                yield event, self.allocations[event].num_bytes
            else:
                index = -1 - event
                yield index, -self.allocations[index].num_bytes

    def flops(self) -> int:
        """Add up the floating-point operations of the step."""
        return sum(operation.num_flops for operation in self.operations)
