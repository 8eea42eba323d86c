"""What was recorded so far, once each, and how much of it there was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from memfit.errors import StrategyError
from memfit.planner.search.candidates import (
    Candidate,
    Evaluator,
    Strategies,
    recorded_members,
)
from memfit.planner.search.patience import Patience

_MOST_EFFORT = 2
"""As a multiple of the bound, what is given up on, though nothing that fits was found."""
_MOST_IN_ALL = 3
"""The same, when nothing at all is recorded any more around a plan that fits."""


class Recordings:
    """Record combinations, each once, and remember what that gave.

    ``most_operators`` bounds the effort: operators in everything that was recorded, which is what
    planning spends its time on, and ``patience`` its time. ``noticed`` is told of what was
    recorded.
    """

    def __init__(
        self,
        evaluate: Evaluator,
        most_operators: float = float("inf"),
        patience: Patience | None = None,
        noticed: Callable[[Candidate], None] | None = None,
    ) -> None:
        self._evaluate = evaluate
        self._most_operators = most_operators
        self._patience = patience or Patience()
        self._noticed = noticed
        self._num_operators = 0
        self._counted: set[Strategies] = set()
        self.tried: dict[Strategies, Candidate] = {}
        """Every combination that was recorded, in that order."""
        self.refused: dict[str, str] = {}
        """Strategies that turned out not to apply while they were recorded, with the reason."""

    @property
    def is_spent(self) -> bool:
        """Return whether the effort was spent, or the time is over."""
        return self._num_operators >= self._most_operators or self._patience.is_over

    @property
    def is_given_up(self) -> bool:
        """Return whether it was spent so often that nothing more is looked for."""
        return self._num_operators >= _MOST_EFFORT * self._most_operators

    @property
    def is_over(self) -> bool:
        """Return whether nothing is recorded any more that a plan can do without."""
        return self._patience.is_over or self._num_operators >= _MOST_IN_ALL * self._most_operators

    @property
    def looks_ahead(self) -> bool:
        """Return whether other processes may be used."""
        return self._evaluate.ahead is not None

    def of(self, strategies: Strategies) -> Candidate:
        """Record a combination, a few micro-batches of it where there are many.

        Raises:
            StrategyError: if it turns out not to apply.
        """
        if strategies not in self.tried:
            self._keep(self._evaluate.once_expected(strategies))
        return self.tried[strategies]

    def expect(self, combinations: Iterable[Strategies], *, is_sure: bool = True) -> None:
        """Say what will be asked for next, in that order, so that it can be recorded ahead."""
        if self._evaluate.ahead is not None:
            new = [each for each in dict.fromkeys(combinations) if each not in self.tried]
            self._evaluate.ahead.expect(new, is_sure=is_sure)

    def before_proof(self, strategies: Strategies) -> None:
        """Record pieces, for when it is known that they may be taken."""
        if self._evaluate.before_proof is not None and strategies not in self.tried:
            self._evaluate.before_proof(strategies)

    def in_full(self, strategies: Strategies) -> Candidate:
        """Record a combination with all of its micro-batches.

        Raises:
            StrategyError: if it turns out not to apply.
        """
        short = self.of(strategies)
        if not short.is_exact:
            # What many micro-batches would save by recomputing is estimated from a few of them.
            whole = self._evaluate.in_full(strategies)
            self._keep(replace(whole, refinements=whole.refinements or short.refinements))
        return self.tried[strategies]

    def attempt(self, strategies: Strategies, *, in_full: bool = False) -> Candidate | None:
        """Record a combination; None, with the reason kept, if it turns out not to apply."""
        try:
            return self.in_full(strategies) if in_full else self.of(strategies)
        except StrategyError as error:
            self.refused[error.strategy] = error.reason
            return None

    def _keep(self, candidate: Candidate) -> None:
        self.tried[candidate.strategies] = candidate
        members = recorded_members(candidate.strategies)
        if members not in self._counted:  # what the allocator is told takes no other recording
            self._counted.add(members)
            self._num_operators += candidate.num_operators
        if self._noticed is not None:
            self._noticed(candidate)
