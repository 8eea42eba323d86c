"""Notices when steps take another amount of memory than was predicted, and says in what.

Between two steps only what the job owns can be looked at: parameters, buffers, optimizer states and
the batch. What a peak holds beyond them came and went within the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from memfit.figures import Prediction
from memfit.journal.records import DriftEvent
from memfit.session.storages import owned_bytes
from memfit.trace.events import Category
from memfit.trace.owners import Owned
from memfit.units import MIB

_LEAST_BYTES = MIB
_ALWAYS_LOOKED = 10
_OVERHEAD_FRACTION = 0.002
_LASTING = (Category.PARAMETERS, Category.BUFFERS, Category.OPTIMIZER_STATE, Category.BATCH)
"""What lies there between two steps."""
PASSING = "gradients, saved activations and temporaries"
"""What a step makes and gives back: told apart from nothing else by looking at the job."""
PASSING_WITHOUT_GRADIENTS = "saved activations and temporaries"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One category at the peak, predicted and measured."""

    category: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def growth_bytes(self) -> int:
        return self.measured_bytes - self.predicted_bytes


class _Looks:
    """Bound the time that looking at a job's tensors takes: a large one has thousands of them."""

    def __init__(self) -> None:
        self._begun_seconds = time.perf_counter()
        self._spent_seconds = 0.0
        self._count = 0
        self._highest_off_bytes = 0

    def is_due(self, off_bytes: int, tolerance_bytes: int) -> bool:
        """Test whether to look again: at first, for little time, and at whatever is further off."""
        has_grown = off_bytes > self._highest_off_bytes + tolerance_bytes
        self._highest_off_bytes = max(off_bytes, self._highest_off_bytes)
        seconds = time.perf_counter() - self._begun_seconds
        is_cheap = self._spent_seconds < _OVERHEAD_FRACTION * seconds
        return has_grown or is_cheap or self._count < _ALWAYS_LOOKED

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count a look and its time."""
        started = time.perf_counter()
        yield
        self._spent_seconds += time.perf_counter() - started
        self._count += 1


class DriftWatch:
    """Compare measured peaks with predicted ones, and tell each distinct drift once.

    A drift is told again only when it has grown by another tolerance. Less than was predicted is
    told only of a whole batch: the smaller batches of a last step or of shorter sequences take less
    without anything being wrong.

    Args:
        tolerance_fraction: how far a peak may be off, as a part of the predicted one; never less
            than 1 MiB, and never less than the prediction's own interval.
    """

    def __init__(self, tolerance_fraction: float = 0.05) -> None:
        self._tolerance_fraction = tolerance_fraction
        self._prediction: Prediction | None = None
        self._told: dict[tuple[str, bool], int] = {}
        self._looks = _Looks()

    def check(
        self,
        step: int,
        prediction: Prediction | None,
        measured_peak_bytes: int | None,
        owned: Iterable[Owned],
    ) -> DriftEvent | None:
        """Compare one step; return what there is to tell, or None.

        Args:
            step: counted from 1; the first makes the optimizer states.
            prediction: of the plan in force.
            measured_peak_bytes: the allocated bytes at the peak of the step.
            owned: the job's tensors after the step, its batch included.
        """
        if prediction is None or measured_peak_bytes is None:
            return None
        if prediction is not self._prediction:  # another plan: what it does is news
            self._prediction, self._told = prediction, {}
        predicted_bytes = _predicted_peak_bytes(prediction, step)
        if self._is_as_predicted(prediction, predicted_bytes, measured_peak_bytes):
            return None
        off_bytes = abs(measured_peak_bytes - predicted_bytes)
        if not self._looks.is_due(off_bytes, self._tolerance_bytes(predicted_bytes)):
            return None
        with self._looks.timed():
            live = owned_bytes(owned)
        parts = _parts(prediction, predicted_bytes, measured_peak_bytes, live)
        is_larger = measured_peak_bytes > predicted_bytes
        if not is_larger and not _is_whole_batch(parts):
            return None
        part = self._cause(parts, is_larger=is_larger)
        if not self._is_news(part, off_bytes, predicted_bytes):
            return None
        return DriftEvent(
            step=step,
            predicted_bytes=predicted_bytes,
            measured_bytes=measured_peak_bytes,
            category=part.category,
            predicted_category_bytes=max(0, part.predicted_bytes),
            measured_category_bytes=max(0, part.measured_bytes),
        )

    def _tolerance_bytes(self, predicted_bytes: int) -> int:
        return max(_LEAST_BYTES, int(self._tolerance_fraction * predicted_bytes))

    def _is_as_predicted(
        self, prediction: Prediction, predicted_bytes: int, measured_bytes: int
    ) -> bool:
        if abs(measured_bytes - predicted_bytes) <= self._tolerance_bytes(predicted_bytes):
            return True
        interval = prediction.intervals.get("allocated")
        if interval is None:
            return False
        # The interval is that of a steady step; a first one is as uncertain.
        shift_bytes = predicted_bytes - prediction.peak_allocated_bytes
        return interval.low_bytes <= measured_bytes - shift_bytes <= interval.high_bytes

    def _cause(self, parts: Mapping[str, _Part], *, is_larger: bool) -> _Part:
        """Choose the category that explains a drift: the one that differs most in its direction.

        A larger batch makes activations larger in proportion; the batch is then the cause.
        """
        sign = 1 if is_larger else -1
        most = max(parts.values(), key=lambda part: sign * part.growth_bytes)
        batch = parts[Category.BATCH.value]
        if not is_larger or batch.predicted_bytes <= 0:
            return most
        ratio = batch.measured_bytes / batch.predicted_bytes
        is_larger_batch = ratio > 1 + self._tolerance_fraction
        passing = next(part for part in parts.values() if part.category in _PASSING_NAMES)
        in_proportion = ratio * (1 + self._tolerance_fraction) * max(0, passing.predicted_bytes)
        explains = passing.measured_bytes <= in_proportion + _LEAST_BYTES
        return batch if is_larger_batch and explains and most in (batch, passing) else most

    def _is_news(self, part: _Part, off_bytes: int, predicted_bytes: int) -> bool:
        """Return whether a drift has not been told yet, or has grown by another tolerance."""
        kind = (part.category, part.growth_bytes > 0)
        told_bytes = self._told.get(kind)
        again_bytes = self._tolerance_bytes(predicted_bytes)
        if told_bytes is not None and off_bytes <= told_bytes + again_bytes:
            return False
        self._told[kind] = off_bytes
        return True


_PASSING_NAMES = (PASSING, PASSING_WITHOUT_GRADIENTS)


def _predicted_peak_bytes(prediction: Prediction, step: int) -> int:
    return prediction.first_step_peak_bytes if step == 1 else prediction.peak_allocated_bytes


def _parts(
    prediction: Prediction,
    predicted_bytes: int,
    measured_bytes: int,
    live: Mapping[Category, int],
) -> dict[str, _Part]:
    """Set what was predicted against what was measured, category by category.

    The peak of a first step is predicted as a whole; its lasting parts are those of a steady one.
    """
    lasting = [*_LASTING]
    passing_name = PASSING
    if live.get(Category.GRADIENTS):
        lasting.append(Category.GRADIENTS)
        passing_name = PASSING_WITHOUT_GRADIENTS
    parts = {
        category.value: _Part(
            category=category.value,
            predicted_bytes=prediction.by_category.get(category.value, 0),
            measured_bytes=live.get(category, 0),
        )
        for category in lasting
    }
    parts[passing_name] = _Part(
        category=passing_name,
        predicted_bytes=predicted_bytes - sum(p.predicted_bytes for p in parts.values()),
        measured_bytes=measured_bytes - sum(p.measured_bytes for p in parts.values()),
    )
    return parts


def _is_whole_batch(parts: Mapping[str, _Part]) -> bool:
    """Test whether a batch is as large as the job's; where that was not predicted, nobody knows."""
    batch = parts[Category.BATCH.value]
    return 0 < batch.predicted_bytes <= batch.measured_bytes
