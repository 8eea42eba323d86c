"""What waits in the search's queue, the fastest first."""

from __future__ import annotations

from dataclasses import dataclass, field

from memfit.planner.search.candidates import Evaluated, Refinement, Strategies


@dataclass(slots=True, eq=False)
class Node:
    """A combination without recomputation."""

    strategies: Strategies
    split: int
    """How often the batch is halved."""
    parent: Node | None
    evaluated: Evaluated | None = None
    correction_bytes: int | None = None
    """What the last recorded refinement took more than was estimated; None before there is one."""
    skipped: list[Refinement] = field(default_factory=list)
    """Refinements that were not recorded, because they were estimated to be too large."""


@dataclass(slots=True, order=True)
class Entry:
    """Something in the queue: a node to open, a refinement to record, or a recorded candidate."""

    seconds: float
    peak_bytes: int
    labels: tuple[str, ...]
    node: Node = field(compare=False)
    refinement: Refinement | None = field(compare=False, default=None)
    candidate: Strategies | None = field(compare=False, default=None)

    @property
    def is_node(self) -> bool:
        """Return whether it is a node to open."""
        return self.refinement is None and self.candidate is None
