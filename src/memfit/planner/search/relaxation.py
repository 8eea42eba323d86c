"""Spends what a plan leaves of its budget on pieces that are kept instead of run again."""

from __future__ import annotations

from memfit.errors import StrategyError
from memfit.planner.search.candidates import Candidate, Strategies
from memfit.planner.search.neighbours import Neighbours
from memfit.planner.search.recordings import Recordings
from memfit.strategies.plan import splitting_of

_FIRST = 2
_MOST_RECORDINGS = 3
_WORTHWHILE = 1.25
"""Smaller pieces take longer, so so many times as many rows have to be kept with them."""


def relaxed(found: Candidate, recordings: Recordings, neighbours: Neighbours) -> Candidate:
    """Keep as many pieces as the budget holds; return the candidate itself where that is none.

    Where pieces of half the size fill the budget better by far, they are taken.
    """
    num_pieces, num_halves = _room(found, recordings)
    best = _filled(found, num_pieces, recordings)
    if best is not found and num_halves < _WORTHWHILE * 2 * num_pieces:
        return best
    may_halve = num_halves and not recordings.is_over
    halved = neighbours.halved(found.strategies) if may_halve else None
    smaller = recordings.attempt(halved, in_full=True) if halved else None
    if smaller is None or not smaller.prediction.fits:
        return best
    return min(best, _filled(smaller, num_halves, recordings), key=_preferred)


def _room(found: Candidate, recordings: Recordings) -> tuple[int, int]:
    """Estimate how many pieces can be kept, and how many of half the size; 0 where none can.

    The peak grows in a straight line with the pieces that are kept, from the second on: the first
    takes the place of the one that is run again.
    """
    first = _keeping(found.strategies, _FIRST, recordings)
    if first is None:
        return 0, 0
    per_piece_bytes = first.peak_bytes - found.peak_bytes
    if per_piece_bytes <= 0:
        return _FIRST, 0
    free_bytes = (found.prediction.budget_bytes or 0) - found.peak_bytes
    # A piece of half the size leaves the other half of what is run again free as well.
    return 1 + free_bytes // per_piece_bytes, 2 + 2 * free_bytes // per_piece_bytes


def _preferred(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.prediction.fits, candidate.prediction.step_seconds


def _filled(found: Candidate, num_pieces: int, recordings: Recordings) -> Candidate:
    """Keep so many pieces of a candidate, or fewer until they fit."""
    best = found
    for number in range(num_pieces, max(0, num_pieces - _MOST_RECORDINGS), -1):
        candidate = None if recordings.is_over else _keeping(found.strategies, number, recordings)
        if candidate is None or candidate.prediction.fits:
            return best if candidate is None else min(best, candidate, key=_preferred)
    return best


def _keeping(strategies: Strategies, num_pieces: int, recordings: Recordings) -> Candidate | None:
    """Record a combination that keeps some pieces; None if it runs none again, or cannot be."""
    split = splitting_of(strategies)
    kept = None if split is None else split.keeping(num_pieces)
    if kept is None:
        return None
    members = tuple(kept if member is split else member for member in strategies)
    try:
        return recordings.in_full(members)
    except StrategyError:
        return None  # what runs its pieces again may do so all the same
