"""What was recorded so far, once each, and how much of it there was."""

from __future__ import annotations

from dataclasses import replace

from memfit.errors import StrategyError
from memfit.planner.search.candidates import Candidate, Evaluated, Evaluator, Strategies


class Recorded:
    """Record combinations, each once, and keep what that gave."""

    def __init__(self, evaluate: Evaluator) -> None:
        self._evaluate = evaluate
        self._evaluated: dict[Strategies, Evaluated] = {}
        self.refused: dict[str, str] = {}
        """Strategies that turned out not to apply while they were recorded, with the reason."""
        self.num_operators = 0
        """Operators in everything that was recorded, which is what planning spends its time on."""

    def __len__(self) -> int:
        """Return the number of combinations."""
        return len(self._evaluated)

    @property
    def tried(self) -> dict[Strategies, Candidate]:
        """Return every combination that was recorded, in that order."""
        return {strategies: self._candidate(strategies) for strategies in self._evaluated}

    def of(self, strategies: Strategies) -> Evaluated:
        """Record a combination, a few micro-batches of it where there are many.

        Raises:
            StrategyError: if it turns out not to apply.
        """
        if strategies not in self._evaluated:
            self._keep(strategies, self._evaluate.in_short(strategies))
        return self._evaluated[strategies]

    def in_full(self, strategies: Strategies) -> Candidate:
        """Record a combination with all of its micro-batches.

        Raises:
            StrategyError: if it turns out not to apply.
        """
        short = self.of(strategies)
        if not short.is_exact:
            # What many micro-batches would save by recomputing is estimated from a few of them.
            whole = self._evaluate.in_full(strategies)
            whole = replace(whole, refinements=whole.refinements or short.refinements)
            self._keep(strategies, whole)
        return self._candidate(strategies)

    def attempt(self, strategies: Strategies, *, in_full: bool = False) -> Candidate | None:
        """Record a combination; None, with the reason noted, if it turns out not to apply."""
        try:
            if in_full:
                return self.in_full(strategies)
            self.of(strategies)
        except StrategyError as error:
            self.refused[error.strategy] = error.reason
            return None
        return self._candidate(strategies)

    def _keep(self, strategies: Strategies, evaluated: Evaluated) -> None:
        self._evaluated[strategies] = evaluated
        self.num_operators += evaluated.num_operators

    def _candidate(self, strategies: Strategies) -> Candidate:
        prediction = self._evaluated[strategies].prediction
        return Candidate(strategies=strategies, prediction=prediction)
