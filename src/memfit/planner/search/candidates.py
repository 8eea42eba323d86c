"""What the search handles: combinations, what recording them gave, and how to make them smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memfit.figures import Prediction
from memfit.planner.recompute.assignment import Known
from memfit.planner.recompute.chain import Chain
from memfit.strategies.base import Strategy
from memfit.strategies.plan import splitting_of

Strategies = tuple[Strategy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """A combination made smaller by recomputing blocks, with estimates of what it takes."""

    strategies: Strategies
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A combination, what recording it gave, and how it can be made smaller."""

    strategies: Strategies
    prediction: Prediction
    is_exact: bool = True
    """Whether the whole step was recorded, not only its first micro-batches."""
    num_operators: int = 0
    """How many its recording has."""
    refinements: Sequence[Refinement] = ()
    """From the fastest to the smallest; empty where nothing can be recomputed."""
    chain: Chain | None = None
    """What the refinements were chosen from; None where nothing can be recomputed."""
    known: Known = field(default_factory=dict, repr=False)
    """What was found of the chain, for whatever budget."""
    repeats: float = 1.0
    """How many times what was recorded is run in a step."""

    @property
    def peak_bytes(self) -> int:
        """Return the peak that the budget bounds."""
        return self.prediction.bounded_bytes()

    @property
    def floor_bytes(self) -> int:
        """Return the smallest peak to be expected of it."""
        return min([self.peak_bytes, *(each.peak_bytes for each in self.refinements)])

    @property
    def cost(self) -> tuple[float, int, tuple[str, ...]]:
        """Order candidates: faster first, then smaller, then by name so that ties are settled."""
        labels = tuple(strategy.label() for strategy in self.strategies)
        seconds = self.prediction.step_seconds
        return (seconds, self.peak_bytes, (str(len(labels)), *labels))


class Ahead(Protocol):
    """Records combinations before they are asked for."""

    def expect(self, combinations: Iterable[Strategies], *, is_sure: bool = True) -> None:
        """Hear of what will be asked for next, in that order, surely or perhaps."""

    def take(self, strategies: Strategies) -> Candidate | None:
        """Return what was recorded ahead; None if nothing was."""


class Evaluator:
    """Records combinations for the search."""

    def __init__(
        self,
        in_short: Callable[[Strategies], Candidate],
        in_full: Callable[[Strategies], Candidate] | None = None,
        ahead: Ahead | None = None,
        before_proof: Callable[[Strategies], None] | None = None,
    ) -> None:
        self.in_short = in_short
        self.in_full = in_full or in_short
        self.ahead = ahead
        self.before_proof = before_proof
        """Records pieces before it is known whether they may be taken; None where nothing does."""

    def once_expected(self, strategies: Strategies) -> Candidate:
        """Record a combination in short, or take what was recorded ahead."""
        found = None if self.ahead is None else self.ahead.take(strategies)
        return found or self.in_short(strategies)


def recorded_members(strategies: Strategies) -> Strategies:
    """Leave out what changes nothing that is recorded, such as what the allocator is told."""
    return tuple(strategy for strategy in strategies if strategy.is_recorded)


def keeping_nothing(strategy: Strategy) -> Strategy:
    """Return a strategy that runs all of its pieces again, where it runs any again."""
    split = strategy.splitting
    return strategy if split is None else split.keeping(0) or strategy


def num_recomputed(strategies: Strategies, batch_size: int) -> int:
    """Count the pieces that a strategy runs again by itself; choosing blocks adds nothing then."""
    split = splitting_of(strategies)
    if split is None or not split.keeps_batch_whole:
        return 0
    return -(-batch_size // split.micro_batch_size)
