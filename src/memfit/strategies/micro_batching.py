"""Micro-batching: the batch is carried out in pieces whose gradients are added up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from memfit.session.facts import JobFacts
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Strategy, Undo, halvings


@dataclass(frozen=True, kw_only=True)
class MicroBatching(Strategy):
    """Split each batch into micro-batches and add up their gradients, weighted by their counts.

    A mean loss is weighted by the samples of each micro-batch, a ``Total(sum, count)`` by the true
    count over the whole batch, so uneven and partial batches stay exact. Dropout draws other masks
    than the whole batch would: same in law.

    Limits: a loss or layer that couples samples (batch normalisation, in-batch negatives) is not a
    sum over samples. Batch normalisation is detected and refused; a coupled loss is not.
    Source: the gradient of a sum is the sum of the gradients; the weighting error of common
    frameworks is described in https://github.com/huggingface/transformers/pull/34191.
    """

    micro_batch_size: int

    name: ClassVar[str] = "micro-batching"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            msg = f"micro_batch_size must be at least 1, not {self.micro_batch_size}"
            raise ValueError(msg)

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Halve the batch until one sample is left."""
        for num_samples in halvings(facts.batch_size):
            yield cls(micro_batch_size=num_samples)

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Dropout masks differ from those of the whole batch."""
        return Numerics.SAME_IN_LAW if facts.has_dropout else Numerics.EXACT

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse batch normalisation, whose statistics couple the samples."""
        if not facts.batch_norms:
            return None
        names = ", ".join(facts.batch_norms[:3]) + (", ..." if len(facts.batch_norms) > 3 else "")
        return (
            f"batch normalisation takes its statistics over the whole batch ({names}), so "
            "micro-batches would train something else. The exact way is batchnorm-replay, which "
            "keeps the statistics of the whole batch; or freeze them with .eval()."
        )

    def apply(self, session: Session) -> Undo:
        """Set the size that the session splits batches into."""
        before = session.micro_batch_size
        session.micro_batch_size = self.micro_batch_size

        def undo() -> None:
            session.micro_batch_size = before

        return undo
