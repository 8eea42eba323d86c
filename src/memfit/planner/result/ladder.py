"""Ever smaller plans below the chosen one, to go on with should it not fit after all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memfit.planner.search.candidates import Candidate, Refinement, Strategies
from memfit.planner.search.reserve import RESERVE_SHARE, reserve_in_pieces
from memfit.planner.search.search import Search
from memfit.planner.search.tree import SearchNode
from memfit.strategies.plan import splitting_of

_RUNGS = (0.85, 0.6)
"""Peaks of the safer plans, as shares of the chosen one's."""
_ENOUGH = 0.95
"""Where the search knows nothing below the first rung, this share of the peak is safer as well."""
_MOST_RECORDINGS = 12
"""So many combinations that the search had no reason to look at are recorded for the ladder."""
_MOST_RECORDINGS_ONCE_SPENT = 3
"""The same where the search has spent its effort."""
_MOST_WRONG = 3
"""So many estimates that turned out wrong are enough for one rung."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A combination, with what it takes as recorded or as estimated."""

    strategies: Strategies
    peak_bytes: int
    seconds: float
    node: SearchNode | None = None
    """What it refines, where it is estimated."""
    refinement: Refinement | None = None


class Ladder:
    """Find the rungs below a chosen plan, each the fastest known of its size, each recorded."""

    def __init__(self, search: Search) -> None:
        self._shares = (RESERVE_SHARE,) if search.is_long else _RUNGS
        self._search = search
        is_spent = search.recordings.is_spent
        self._most_recordings = _MOST_RECORDINGS_ONCE_SPENT if is_spent else _MOST_RECORDINGS
        self._looked_at: set[Strategies] = set()

    @property
    def _is_over(self) -> bool:
        return self._search.recordings.is_over

    def below(self, best: Candidate) -> list[Candidate]:
        """Return ever smaller plans."""
        rungs = [best]
        reserve = self._in_reserve(best)
        likely = (self._most_likely(int(share * best.peak_bytes)) for share in self._shares)
        expected = (each.strategies for each in likely if each is not None)
        self._search.recordings.expect(expected if reserve is None else [reserve])
        for share in self._shares:
            most_bytes = int(share * best.peak_bytes)
            if rungs[-1].peak_bytes <= most_bytes:
                continue
            rung = None if reserve is None else self._fitting(reserve, in_full=True)
            if rung is None or rung.peak_bytes > most_bytes:
                rung = self.fastest_below(most_bytes)
            if rung is None and rungs[-1] is best:
                rung = self._a_little_below(best)
            if rung is None or rung.peak_bytes >= rungs[-1].peak_bytes:
                break
            rungs.append(rung)
        return rungs[1:]

    def _in_reserve(self, best: Candidate) -> Strategies | None:
        """Return what is held in reserve of pieces, by what the whole batch took; None if nothing.

        Other processes have begun with it before the pieces were recorded.
        """
        search, split = self._search, splitting_of(best.strategies)
        if not search.is_long or self._is_over or split is None:
            return None
        strategies = tuple(each for each in best.strategies if each.splitting is None)
        whole = search.recordings.tried.get(strategies)
        return None if whole is None else reserve_in_pieces(whole, split)

    def _most_likely(self, most_bytes: int) -> _Known | None:
        """Return what is recorded first to stay below a peak."""
        if self._is_over:
            return None
        known = self._recorded_below(most_bytes) + self._estimated_below(most_bytes)
        return min(known, key=_fastest, default=None)

    def fastest_below(self, most_bytes: int) -> Candidate | None:
        """Return the fastest of what is known to stay below a peak, recorded; None if nothing does.

        Does not look for combinations that the search had no reason to try. After a few estimates
        that were wrong, only what is recorded already counts.
        """
        num_wrong = 0
        missed: set[Strategies] = set()
        while True:
            known = self._recorded_below(most_bytes)
            if num_wrong < _MOST_WRONG and not self._is_over:
                known += self._estimated_below(most_bytes)
            left = [entry for entry in known if entry.strategies not in missed]
            if not left:
                return None
            first = min(left, key=_fastest)
            candidate = self._fitting(first.strategies, in_full=True)
            if candidate is not None and candidate.peak_bytes <= most_bytes:
                return candidate
            missed.add(first.strategies)
            if first.node is not None:
                num_wrong += 1
                # The node expects of others what recording this one has shown.
                recorded = self._search.recordings.tried.get(first.strategies)
                if first.node is not None and first.refinement is not None and recorded is not None:
                    first.node.learn(first.refinement, recorded)

    def _recorded_below(self, most_bytes: int) -> list[_Known]:
        search = self._search
        return [
            _Known(strategies, candidate.peak_bytes, candidate.prediction.step_seconds)
            for strategies, candidate in search.recordings.tried.items()
            if candidate.peak_bytes <= most_bytes and search.space.allows(strategies)
            if candidate.is_exact or not self._is_over
        ]

    def _estimated_below(self, most_bytes: int) -> list[_Known]:
        search = self._search
        return [
            _Known(each.strategies, node.expected_bytes(each), each.seconds, node, each)
            for node, each in search.tree.refinements()
            if each.strategies not in search.recordings.tried
            and node.expected_bytes(each) <= most_bytes
            and search.space.allows(each.strategies)
        ]

    def _a_little_below(self, best: Candidate) -> Candidate | None:
        """Return something smaller than the chosen plan, known or looked for."""
        most_bytes = int(_ENOUGH * best.peak_bytes)
        found = self.fastest_below(most_bytes)
        return found if found or self._is_over else self._stepped_down(best, most_bytes)

    def _stepped_down(self, start: Candidate, most_bytes: int) -> Candidate | None:
        """Go down by one halving or one strategy at a time until below a peak."""
        smallest = start
        for strategies in self._smaller(start.strategies):
            self._looked_at.add(strategies)
            candidate = self._fitting(strategies)
            if candidate is None:
                continue
            if candidate.peak_bytes <= most_bytes:
                return self._fitting(strategies, in_full=True)
            smallest = min(smallest, candidate, key=lambda each: each.peak_bytes)
        return None if smallest is start else self._stepped_down(smallest, most_bytes)

    def _smaller(self, strategies: Strategies) -> Iterator[Strategies]:
        """Yield what was not looked at yet: the next halving, then one strategy more at a time."""
        neighbours = self._search.neighbours
        halved = neighbours.halved(strategies)
        nodes = neighbours.smaller(SearchNode(strategies, 0, None))
        for smaller in [*([halved] if halved else []), *(node.strategies for node in nodes)]:
            is_enough = self._is_over or len(self._looked_at) >= self._most_recordings
            if smaller not in self._looked_at and not is_enough:
                yield smaller

    def _fitting(self, strategies: Strategies, *, in_full: bool = False) -> Candidate | None:
        """Record a combination; None if it cannot be, or exceeds a budget."""
        candidate = self._search.recordings.attempt(strategies, in_full=in_full)
        return candidate if candidate is not None and candidate.prediction.fits else None


def _fastest(known: _Known) -> tuple[float, int]:
    return known.seconds, known.peak_bytes
