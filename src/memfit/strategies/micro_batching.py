"""Micro-batching: the batch is run in pieces whose gradients are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memfit.session.block_names import first_few
from memfit.session.carried_effects import CarriedEffects
from memfit.session.session import Session
from memfit.strategies.base import AbstractSplitting, Numerics, Seam, Undo
from memfit.strategies.facts import JobFacts, known_separation


@dataclass(frozen=True, kw_only=True)
class MicroBatching(AbstractSplitting):
    """Split each batch into micro-batches and add up their gradients, weighted by their counts.

    A mean loss is weighted by the samples of each micro-batch, a ``Total(sum, count)`` by the true
    count over the whole batch, so uneven and partial batches stay exact. Dropout draws other masks
    than the whole batch would: same in law.

    What the forward changes besides its results (the power iteration of spectral norm, counters)
    happens once per step. Where it depends on the samples, the first step is an error, before
    anything is updated.

    Limits: a loss or layer that couples samples (batch normalisation, in-batch negatives) is not a
    sum over samples. Batch normalisation is refused here. What else the step does with its samples
    is followed operator by operator (``memfit.separation.separation``): what mixes them is refused,
    and what cannot be followed is unproved.
    Source: the gradient of a sum is the sum of the gradients; the weighting error of common
    frameworks is described in https://github.com/huggingface/transformers/pull/34191.
    """

    name: ClassVar[str] = "micro-batching"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.WINDOW})
    goes_with_shards: ClassVar[bool] = True
    never_faster: ClassVar[bool] = True

    def unsuited(self, facts: JobFacts) -> str | None:
        """Refuse batch normalisation, whose statistics couple the samples."""
        if not facts.batch_norms:
            return None
        names = first_few(facts.batch_norms)
        return (
            f"batch normalisation takes its statistics over the whole batch ({names}), so "
            "micro-batches would train something else. The exact way is batchnorm-replay, which "
            "keeps the statistics of the whole batch; or freeze them with .eval()."
        )

    def apply(self, session: Session) -> Undo:
        """Set the size that the session splits batches into."""
        found = self.separability(known_separation(session))
        carried = CarriedEffects(session, self.name, overwritten=found.overwritten)
        return session.replace(micro_batch_size=self.micro_batch_size, carried_effects=carried)
