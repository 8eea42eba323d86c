"""Loss chunking: losses over many candidates are streamed, so that no score matrix is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

from memfit.analysis.separability import PROVED, Separability, worst_of
from memfit.losses.chunking import StreamableLoss, chunked, noted_losses
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts

_MOST_CHUNKS = 1024
"""More chunks than this are offered to nobody: each of them takes its time."""


@dataclass(frozen=True, slots=True)
class StreamableCandidates:
    """What a step's largest streamable loss scores."""

    most: int | None = None
    """The most candidates; 0 without such a loss, None where no step has been seen yet."""
    smallest_chunk: int = 1
    """The fewest of them that are worth streaming at a time."""
    separability: Separability = PROVED
    """Whether each loss treats its candidates one by one: the worst that is known of any."""


@dataclass(frozen=True, kw_only=True)
class LossChunking(Strategy):
    """Stream the losses of memfit.losses over chunks of candidates.

    Scores of batch x candidates are never stored; each chunk is computed again in backward. That is
    exact where candidates are treated one by one. What a loss does to them with functions of the
    job's own (``prepare`` and ``terms`` of softmax_mean, the kernels of a mixture) is followed
    candidate by candidate: what mixes them is refused, and what cannot be followed is unproved.

    Limits: acts only on losses that are computed by memfit.losses.
    Source: the loss is a sum over candidates, so its gradient is too; the derivation is in
    memfit.losses.one_to_many.
    """

    num_candidates: int

    name: ClassVar[str] = "loss-chunking"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.FORWARD})
    goes_with_shards: ClassVar[bool] = True
    never_faster: ClassVar[bool] = True
    costs_little: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.check_at_least(1, "num_candidates")

    @classmethod
    @contextmanager
    def probe(cls) -> Iterator[Callable[[], StreamableCandidates]]:
        """Note the losses of a step."""
        with noted_losses() as losses:
            yield partial(_largest, losses)

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer a quarter of the candidates, then ever fewer, down to what is worth a chunk."""
        found = facts.of(StreamableCandidates)
        total, least = found.most or 0, found.smallest_chunk
        divisor = 4 if least == 1 else 8
        num_candidates = total // 4
        while num_candidates >= max(least, total // _MOST_CHUNKS, 1):
            yield cls(num_candidates=num_candidates)
            num_candidates //= divisor

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse steps without a streamable loss, and losses in which candidates meet."""
        known = facts.of(StreamableCandidates)
        if known.most == 0:
            return "the loss is not computed by memfit.losses, so there is nothing to stream."
        if known.separability.is_refuted:
            return f"candidates meet before they are scored: {known.separability.sentence}."
        return None

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Chunks draw other random numbers; what could not be followed is unproved."""
        found = facts.of(StreamableCandidates).separability
        if not found.is_proved:
            return Numerics.UNPROVED
        return Numerics.SAME_IN_LAW if found.draws else Numerics.EXACT

    def apply(self, session: Session) -> Undo:
        """Set the chunk size around forward and loss."""
        return session.wrap_forward(partial(chunked, self.num_candidates))


def _largest(losses: Sequence[StreamableLoss]) -> StreamableCandidates:
    """Return what the largest of some losses scores."""
    largest = max(losses, key=lambda loss: loss.num_candidates, default=None)
    if largest is None:
        return StreamableCandidates(0)
    found = worst_of([loss.separability for loss in losses])
    return StreamableCandidates(largest.num_candidates, largest.smallest_chunk, found)
