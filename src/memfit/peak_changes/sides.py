"""One of the two that are compared: a prediction, or what a run has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from memfit.errors import DataError
from memfit.figures import BOUNDED_FIGURES

from .moments import StepMoments
from .saved import SavedPrediction


class Kind(StrEnum):
    """Say how the figures of a side are known."""

    PREDICTED = "predicted"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A prediction, or a run: its peaks, and what lives there as far as it is known."""

    source: str
    """What the user named: a file, a folder, a job or a script."""
    title: str
    """The job, the script or the run that stands there."""
    kind: Kind
    device: str
    peaks: Mapping[str, int]
    """Peak bytes by phase; of a run, one peak."""
    figures: Mapping[str, int | None]
    """Other figures in bytes by the names of the data classes; None where one is not known."""
    peak_of: str = "allocated"
    """What the peaks are of: ``allocated``, or ``host`` where a run has measured no other."""
    step_seconds: float | None = None
    batch_size: int | None = None
    ranks: int = 1
    strategies: Sequence[str] = ()
    by_category: Mapping[str, int] = field(default_factory=dict)
    by_module: Mapping[str, int] = field(default_factory=dict)
    moments: StepMoments | None = None
    budget_bytes: int | None = None
    budget_of: str = "allocated"
    fits: bool | None = None
    torch_version: str = ""
    device_file: str = ""
    """The text of the device's file, where that is one of the user's own."""

    @property
    def peak_bytes(self) -> int:
        """Return the highest peak of all phases."""
        return max(self.peaks.values())

    @property
    def peak_phase(self) -> str:
        """Return the phase with the highest peak; the last of those that are equal."""
        return max(reversed(list(self.peaks)), key=lambda phase: self.peaks[phase])

    def bounded_bytes(self, budget_of: str) -> int:
        """Return the figure that a budget bounds, the peak where that one is not known."""
        if budget_of == "allocated":
            return self.peak_bytes
        return self.figures.get(BOUNDED_FIGURES[budget_of]) or self.peak_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, without the lines."""
        return {
            "source": self.source,
            "title": self.title,
            "kind": self.kind.value,
            "device": self.device,
            "ranks": self.ranks,
            "batch_size": self.batch_size,
            "strategies": list(self.strategies),
            "torch_version": self.torch_version,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            "peak_of": self.peak_of,
            "phases": [
                {"phase": phase, "peak_allocated_bytes": num_bytes}
                for phase, num_bytes in self.peaks.items()
            ],
            **self.figures,
            "step_seconds": self.step_seconds,
            "by_category": dict(self.by_category),
            "by_module": dict(self.by_module),
            "budget_bytes": self.budget_bytes,
            "budget_of": self.budget_of,
            "fits": self.fits,
        }


def side_of(saved: SavedPrediction, source: str) -> Side:
    """Return a saved prediction as a side.

    Args:
        saved: what was predicted.
        source: where it was read from, or what was predicted just now.
    """
    prediction = saved.prediction
    if prediction.fits is None and prediction.budget_bytes is not None:
        reason = "recording ended before a steady step. Predict it again with more --most-seconds"
        raise DataError(source, reason)
    return Side(
        source=source,
        title=saved.source,
        kind=Kind.PREDICTED,
        device=prediction.device,
        peaks=saved.phases,
        figures={
            "peak_allocated_bytes": prediction.peak_allocated_bytes,
            "peak_reserved_bytes": prediction.peak_reserved_bytes,
            "process_bytes": prediction.process_bytes,
        },
        step_seconds=prediction.step_seconds,
        batch_size=prediction.batch_size,
        ranks=prediction.ranks,
        strategies=prediction.strategies,
        by_category=prediction.by_category,
        by_module=prediction.by_module,
        moments=saved.moments,
        device_file=saved.device_file,
        budget_bytes=prediction.budget_bytes,
        budget_of=prediction.budget_of,
        fits=prediction.fits,
        torch_version=saved.torch_version,
    )
