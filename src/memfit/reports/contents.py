"""What a report shows, as data: every renderer takes these records and computes nothing new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.figures import ConsideredPlan, Measurement, Prediction

from .wording import measured_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that the page of one run shows."""

    title: str
    job: str
    device: str
    budget_bytes: int | None
    plain: Prediction
    planned: Prediction
    measured: Measurement | None
    rows: Sequence[ConsideredPlan]
    metrics: Sequence[Mapping[str, Any]]
    """One mapping per epoch or validation: its number first (``epoch`` or ``step``), then loss,
    valid_mrr, seconds, measured_peak_bytes and the like."""
    results: Mapping[str, Any]
    """The final metrics by name."""
    command: str
    """The command line that repeats the run."""
    run_peak_bytes: int | None = None
    """The highest peak allocated that was measured while training; ``measured`` is one step of the
    largest batch. None where training was not measured."""
    pictures: Sequence[tuple[str, bytes]] = ()
    """What the system shows of its results: titles and PNG files."""

    @property
    def found_bytes(self) -> int | None:
        """Return the measured figure that the budget bounds: training's own where it is known."""
        budget_of = self.planned.budget_of
        if budget_of == "allocated" and self.run_peak_bytes is not None:
            return self.run_peak_bytes
        return None if self.measured is None else measured_bytes(self.measured, budget_of)
