"""What a scan gives: scores, the highest and lowest of them, and how they were found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memfit.figures import Prediction

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """For each test sample the training samples with the highest, or the lowest, scores."""

    indices: Sequence[Sequence[int]]
    """Training samples, the extreme one first; of equal ones the one with the lower number."""
    scores: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """How scores were found."""

    num_train: int
    checkpoints: Sequence[str]
    learning_rates: Sequence[float]
    parameters: Sequence[str]
    """Those whose gradients were compared."""
    unread: Mapping[str, str]
    """Those of them whose gradients were made by backward passes, and why; as exact, but slower."""
    unproved: Sequence[str]
    """Those that were read as factors without having been compared, as asked for."""
    method: str
    """``exact`` or ``projected``, which is an approximation."""
    proof_error: float
    """The largest difference from backward passes on a few samples, relative to their norms."""
    train_chunk: int
    """How many training samples were read at a time."""
    test_chunk: int
    """How many test samples were held at a time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores(Found):
    """The influence of training samples on test samples."""

    num_test: int
    scores: Numbers | None
    """(num_test, num_train), on disk where the scan had a folder; None where only the highest and
    lowest were kept."""
    helpful: Ranked | None
    """The highest scores: what these samples taught lowered the test sample's loss."""
    harmful: Ranked | None
    """The lowest scores."""

    def as_json(self) -> dict[str, Any]:
        """Return everything as what JSON has."""
        fields = asdict(self)
        return fields | {"scores": None if self.scores is None else self.scores.tolist()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SelfInfluence(Found):
    """The influence of samples on themselves: their squared gradient norms, summed up."""

    scores: Numbers
    """(num_train,)."""

    def highest(self, number: int) -> Ranked:
        """Return the samples with the highest scores, as those with a wrong label often have."""
        rows = np.argsort(-self.scores, kind="stable")[:number]
        return Ranked(indices=[rows.tolist()], scores=[self.scores[rows].tolist()])

    def as_json(self) -> dict[str, Any]:
        """Return everything as what JSON has."""
        return asdict(self) | {"scores": self.scores.tolist()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanPrediction:
    """What a scan takes."""

    step: Prediction
    """One step: a chunk of test samples read, and one of training samples beside it."""
    proof: Prediction
    """The proof on a few samples before the first step."""
    train_chunk: int
    test_chunk: int
    num_steps: int
    """Of all checkpoints."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Return the peak of the whole scan, weights included."""
        return max(self.step.peak_allocated_bytes, self.proof.peak_allocated_bytes)

    @property
    def process_bytes(self) -> int:
        """Return what the process takes of the device."""
        return max(self.step.process_bytes, self.proof.process_bytes)

    @property
    def seconds(self) -> float:
        """Return how long all steps take at most: as if each read its test samples anew."""
        return self.num_steps * self.step.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a scan is."""

    checkpoint: str
    """The one that is resident."""
    num_done: int
    """Steps done, of all checkpoints: one for each chunk of training samples beside one of test
    samples."""
    num_steps: int
    seconds: float
    """Since this process began or continued the scan."""
