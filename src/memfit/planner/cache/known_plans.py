"""What is known of plans that earlier calls have recorded whole: what they take, and how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memfit.figures import BOUNDED_FIGURES
from memfit.planner.search.candidates import Candidate, Strategies
from memfit.prediction.budget import MemoryBudget

Name = tuple[object, ...]
"""All that a recording depends on besides the job and the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlan:
    """A combination that was recorded whole; its recording is read only where it is wanted."""

    strategies: Strategies
    seconds: float
    bytes_of: Mapping[str, int]
    """What a budget may bound."""
    usual: str
    """Which of them a budget bounds by default."""
    host_bytes: int
    disk_bytes: int

    @classmethod
    def of(cls, candidate: Candidate) -> KnownPlan:
        """Keep what a budget is held against."""
        found = candidate.prediction
        return cls(
            strategies=candidate.strategies,
            seconds=found.step_seconds,
            bytes_of={of: found.bounded_bytes(of) for of in BOUNDED_FIGURES},
            usual=found.budget_of,
            host_bytes=found.host_bytes,
            disk_bytes=found.disk_bytes,
        )

    def fits(self, budget: MemoryBudget) -> bool:
        """Return whether it keeps to a budget, as far as that is known."""
        num_bytes = self.bytes_of[budget.of or self.usual]
        return bool(budget.holds(num_bytes, self.host_bytes, self.disk_bytes))
