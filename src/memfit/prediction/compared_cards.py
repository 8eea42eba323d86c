"""One step on several cards: where it fits, how fast it is there, and which batch would fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memfit.cost.operator_times import time_certainty
from memfit.devices.spec import Device
from memfit.figures import Certainty, Prediction
from memfit.prediction.largest_batch import LargestBatch
from memfit.prediction.recording import StepRecording


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedCard:
    """What a step takes on one of several devices."""

    prediction: Prediction
    title: str
    """What the device is called at length."""
    memory_bytes: int
    """Of the device, whatever the budget is."""
    seconds_certainty: Certainty
    """How the speeds are known that the step time is estimated from."""
    recorded_for: str
    """The device whose recording this is; another one where that would have been the same."""
    needed_bytes: int
    """The figure that the budget bounds, in the phase of the run that takes most."""
    largest_batch: LargestBatch | None = None
    """None where what was recorded is no job, so that its batch cannot be changed."""

    @property
    def over_bytes(self) -> int:
        """Return how far the step is over the budget; below 0 is what it leaves free."""
        return self.needed_bytes - (self.prediction.budget_bytes or 0)

    def to_json(self) -> dict[str, Any]:
        """Return what stands beside the prediction, as plain values."""
        found = self.largest_batch
        batch_size = self.prediction.batch_size
        at_once = None if found is None else found.batch_size
        return {
            "device_title": self.title,
            "memory_bytes": self.memory_bytes,
            "step_seconds_certainty": self.seconds_certainty.value,
            "over_bytes": None if self.prediction.budget_bytes is None else self.over_bytes,
            "recorded_for": self.recorded_for,
            "largest_batch_size": at_once,
            "largest_batch_is_most": found is not None and found.is_most,
            "largest_micro_batch_size": at_once and min(at_once, batch_size or at_once),
            "largest_micro_batch_reason": "" if found is None else found.reason,
        }


def compared_card(
    prediction: Prediction,
    recording: StepRecording,
    device: Device,
    *,
    recorded_for: str,
    needed_bytes: int | None = None,
    largest_batch: LargestBatch | None = None,
) -> ComparedCard:
    """Put together what is known of a step on one of several devices."""
    return ComparedCard(
        prediction=prediction,
        title=device.title,
        memory_bytes=device.memory_bytes,
        seconds_certainty=time_certainty(recording.steady, device),
        recorded_for=recorded_for,
        needed_bytes=prediction.bounded_bytes() if needed_bytes is None else needed_bytes,
        largest_batch=largest_batch,
    )


def best_first(cards: Iterable[ComparedCard]) -> list[ComparedCard]:
    """Put first where the step fits, the fastest before; then what is least over the budget."""

    def rank(card: ComparedCard) -> tuple[Any, ...]:
        seconds, name = card.prediction.step_seconds, card.prediction.device
        if card.prediction.fits is False:
            return (1, card.over_bytes, seconds, name)
        return (0, seconds, card.memory_bytes, name)

    return sorted(cards, key=rank)
