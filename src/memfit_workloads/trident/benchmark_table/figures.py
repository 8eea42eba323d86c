"""What each row takes: predicted at the document's size, predicted and measured on this CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import memfit
from memfit.devices.spec import CPU, CUDA
from memfit.errors import MemfitError
from memfit.figures import Prediction
from memfit.trace.events import Category, Phase
from memfit_workloads.trident.job import StepSettings, build_job
from memfit_workloads.trident.sizes import DOCUMENT

from .rows import CPU_SIZES, ROWS, Claim, Place, Row

DEVICE = "a100-40gb"
"""The document's card."""
VIDEO, INFRARED = "rgb.video", "infrared"
_BRANCHES = (VIDEO, "rgb.vision", INFRARED, "kinematics", "fusion")
_REST = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFigures:
    """What a row is predicted to take at the document's size."""

    strategies: tuple[str, ...]
    numerics: str
    certainty: str
    peak_allocated_bytes: int
    low_bytes: int
    """Of the interval of ``peak_allocated_bytes``; ``high_bytes`` is the other end."""
    high_bytes: int
    process_bytes: int
    fits: bool
    """Whether the process fits the card."""
    sample_seconds: float
    """Of a step, for each sample."""
    host_bytes: int
    kept_bytes: int
    """What forward has saved when backward begins."""
    by_category: Mapping[str, int]
    by_branch: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFigures:
    """What a row takes here, at a size that runs."""

    strategies: tuple[str, ...]
    numerics: str
    predicted_peak_bytes: int
    peak_allocated_bytes: int
    sample_seconds: float

    @property
    def error_fraction(self) -> float:
        """Return how far the prediction is above what was measured."""
        return self.predicted_peak_bytes / self.peak_allocated_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFigures:
    """All that is known of a row; where something is missing, ``reasons`` has a sentence."""

    name: str
    title: str
    claim: Claim | None
    batch_size: int
    card: CardFigures | None = None
    cpu: CpuFigures | None = None
    reasons: Mapping[str, str]

    @classmethod
    def of(cls, row: Row) -> RowFigures:
        """Begin with nothing known."""
        return cls(
            name=row.name,
            title=row.title,
            claim=row.claim,
            batch_size=row.batch_size,
            reasons={},
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RowFigures:
        """Read what ``to_json`` gives.

        Raises:
            KeyError, TypeError: if it is something else.
        """
        return cls(
            **{
                **content,
                "claim": None if content["claim"] is None else Claim(**content["claim"]),
                "card": _read(CardFigures, content["card"]),
                "cpu": _read(CpuFigures, content["cpu"]),
            }
        )


def _read(kind: Any, content: Mapping[str, Any] | None) -> Any:
    """Read figures of a kind; lists are what JSON makes of tuples."""
    if content is None:
        return None
    return kind(**{**content, "strategies": tuple(content["strategies"])})


def with_card(figures: RowFigures, row: Row) -> RowFigures:
    """Add what the row takes at the document's size, or why that is not known."""
    place = Place(device_kind=CUDA, sizes=DOCUMENT)
    try:
        plan = memfit.Plan(strategies=row.strategies(place))
        job = build_job(place.sizes, StepSettings(batch_size=row.batch_size))
        found = memfit.predict(job, device=DEVICE, plan=plan)
    except MemfitError as error:
        return _without(figures, CUDA, error)
    return replace(figures, card=_card_figures(found, row.batch_size))


def with_cpu(figures: RowFigures, row: Row) -> RowFigures:
    """Add what the row takes here, or why that is not known."""
    place = Place(device_kind=CPU, sizes=CPU_SIZES)
    try:
        plan = memfit.Plan(strategies=row.strategies(place))
        job = build_job(place.sizes, StepSettings(batch_size=row.batch_size))
        found = memfit.measure(job, plan)
    except MemfitError as error:
        return _without(figures, CPU, error)
    if found.predicted_peak_bytes is None:
        reason = "its step cannot be recorded, so there is nothing to compare with"
        return replace(figures, reasons={**figures.reasons, CPU: reason})
    cpu = CpuFigures(
        strategies=tuple(found.strategies),
        numerics=found.numerics,
        predicted_peak_bytes=found.predicted_peak_bytes,
        peak_allocated_bytes=found.peak_allocated_bytes,
        sample_seconds=found.step_seconds / row.batch_size,
    )
    return replace(figures, cpu=cpu)


def _without(figures: RowFigures, kind: str, error: MemfitError) -> RowFigures:
    reason = str(error).partition("\n")[0]
    return replace(figures, reasons={**figures.reasons, kind: reason})


def _card_figures(found: Prediction, batch_size: int) -> CardFigures:
    interval = found.intervals.get("allocated")
    peak_bytes = found.peak_allocated_bytes
    held: Counter[str] = Counter()
    for module, num_bytes in found.by_module.items():
        branch = next((b for b in _BRANCHES if module == b or module.startswith(f"{b}.")), _REST)
        held[branch] += num_bytes
    return CardFigures(
        strategies=tuple(found.strategies),
        numerics=found.numerics,
        certainty=str(found.certainty),
        peak_allocated_bytes=peak_bytes,
        low_bytes=peak_bytes if interval is None else interval.low_bytes,
        high_bytes=peak_bytes if interval is None else interval.high_bytes,
        process_bytes=found.process_bytes,
        fits=bool(found.fits),
        sample_seconds=found.step_seconds / batch_size,
        host_bytes=found.host_bytes,
        kept_bytes=_kept_bytes(found),
        by_category=dict(found.by_category),
        by_branch=dict(held),
    )


def _kept_bytes(found: Prediction) -> int:
    """Return what is saved for backward when that begins, at the first pass of the step."""
    timeline = found.timeline
    if timeline is None:
        return 0
    begin = next(event for event, phase in timeline.phases if phase == Phase.BACKWARD.value)
    return timeline.by_category[Category.SAVED_ACTIVATIONS.value][begin]


def compute(
    begin: Callable[[str], None], show: Callable[[Sequence[RowFigures]], None]
) -> list[RowFigures]:
    """Compute all rows, at the document's size and then here.

    Args:
        begin: is told what is computed next.
        show: gets all rows as far as they are known, after each.
    """
    figures = {row.name: RowFigures.of(row) for row in ROWS}
    for doing, add in (("predicting", with_card), ("running here", with_cpu)):
        for row in ROWS:
            begin(f"{doing}: {row.title}")
            figures[row.name] = add(figures[row.name], row)
            show(list(figures.values()))
    return list(figures.values())
