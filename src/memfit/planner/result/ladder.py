"""Ever smaller plans below the chosen one, to go on with should it not fit after all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memfit.errors import StrategyError
from memfit.planner.search.candidates import Candidate, Evaluated, Evaluator, Strategies
from memfit.planner.search.neighbours import Neighbours
from memfit.planner.search.options import Choices
from memfit.planner.search.queue import Node
from memfit.planner.search.search import Search

_RUNGS = (0.85, 0.6)
"""Peaks of the safer plans, as shares of the chosen one's."""
_RUNG_OF_LONG_STEPS = (0.7,)
"""The same for steps that take long to record."""
_ENOUGH = 0.95
"""Where the search knows nothing below the first rung, this share of the peak is safer as well."""
_MOST_RECORDINGS = 12
"""So many combinations that the search had no reason to look at are recorded for the ladder."""


class Ladder:
    """Find the rungs below a chosen plan, each the fastest known of its size, each recorded."""

    def __init__(
        self, search: Search, evaluate: Evaluator, choices: Choices, *, is_long: bool = False
    ) -> None:
        self._shares = _RUNG_OF_LONG_STEPS if is_long else _RUNGS
        self._search = search
        self._evaluate = evaluate
        self._neighbours = Neighbours(choices, search.refused)
        self.tried: dict[Strategies, Candidate] = {}
        """What was recorded for the ladder alone."""

    def below(self, best: Candidate) -> list[Candidate]:
        """Return ever smaller plans."""
        rungs = [best]
        for share in self._shares:
            most_bytes = int(share * _peak_bytes(best))
            if _peak_bytes(rungs[-1]) <= most_bytes:
                continue
            rung = self._search.fastest_below(most_bytes)
            if rung is None and rungs[-1] is best:
                rung = self._a_little_below(best)
            if rung is None or _peak_bytes(rung) >= _peak_bytes(rungs[-1]):
                break
            rungs.append(rung)
        return rungs[1:]

    def _a_little_below(self, best: Candidate) -> Candidate | None:
        """Return something smaller than the chosen plan, known or looked for."""
        most_bytes = int(_ENOUGH * _peak_bytes(best))
        return self._search.fastest_below(most_bytes) or self._stepped_down(best, most_bytes)

    def _stepped_down(self, start: Candidate, most_bytes: int) -> Candidate | None:
        """Go down by one halving or one strategy at a time until below a peak."""
        smallest = start
        for strategies in self._smaller(start.strategies):
            candidate = self._recorded(strategies, self._evaluate.in_short)
            if candidate is None:
                continue
            if _peak_bytes(candidate) <= most_bytes:
                return self._recorded(strategies, self._evaluate.in_full)
            smallest = min(smallest, candidate, key=_peak_bytes)
        return None if smallest is start else self._stepped_down(smallest, most_bytes)

    def _smaller(self, strategies: Strategies) -> Iterator[Strategies]:
        """Yield what was not recorded yet: the next halving, then one strategy more at a time."""
        halved = self._neighbours.halved(strategies)
        nodes = self._neighbours.smaller(Node(strategies, 0, None))
        for smaller in [*([halved] if halved else []), *(node.strategies for node in nodes)]:
            if smaller not in self.tried and len(self.tried) < _MOST_RECORDINGS:
                yield smaller

    def _recorded(
        self, strategies: Strategies, record: Callable[[Strategies], Evaluated]
    ) -> Candidate | None:
        """Record a combination; None if it cannot be, or exceeds another budget."""
        try:
            prediction = record(strategies).prediction
        except StrategyError as error:
            self._search.refused[error.strategy] = error.reason
            return None
        candidate = Candidate(strategies=strategies, prediction=prediction)
        self.tried[strategies] = candidate
        return candidate if prediction.fits else None


def _peak_bytes(candidate: Candidate) -> int:
    return candidate.prediction.bounded_bytes()
