"""Spends what a plan leaves of its budget on pieces that are kept instead of run again."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import StrategyError
from memfit.planner.search.candidates import Candidate, Strategies
from memfit.planner.search.neighbours import Neighbours
from memfit.planner.search.recordings import Recordings
from memfit.strategies.plan import splitting_of

_MOST_RECORDINGS = 3
_MOSTLY_COMPARED = 2
_WORTHWHILE = 1.25
"""Smaller pieces take longer, so so many times as many rows have to be kept with them."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A combination that keeps some pieces, and how many rows these have."""

    strategies: Strategies
    num_rows: int
    worth: float
    """Rows of the larger pieces that save as much time."""


def relaxed(found: Candidate, recordings: Recordings, neighbours: Neighbours) -> Candidate:
    """Keep as many pieces as the budget holds; return the candidate itself where that is none.

    The peak grows in a straight line with the rows that are kept, up to that of the whole batch
    with nothing run again. Where nothing is kept, half the rows of a piece take as much as what is
    run again: a loss that couples samples mostly compares two representations of each, which are
    run again one after the other. Whatever is recorded corrects the line. Pieces of half the size
    are taken where they fill the budget better by far.
    """
    split, num_rows = splitting_of(found.strategies), found.prediction.batch_size
    if split is None or split.keeping(1) is None or not num_rows:
        return found
    whole = _recorded(tuple(m for m in found.strategies if m is not split), recordings)
    if whole is None or split.micro_batch_size >= num_rows:
        return found
    seconds_per_row = (found.prediction.step_seconds - whole.prediction.step_seconds) / num_rows
    budget_bytes = found.prediction.budget_bytes or 0
    best, tried = found, {found.strategies}
    kept_rows, kept_bytes = split.micro_batch_size / _MOSTLY_COMPARED, found.peak_bytes
    for _ in range(_MOST_RECORDINGS):
        bytes_per_row = (whole.peak_bytes - kept_bytes) / (num_rows - kept_rows)
        if recordings.is_over or bytes_per_row <= 0:
            break
        most_rows = num_rows - (whole.peak_bytes - budget_bytes) / bytes_per_row
        ways = _ways(found.strategies, min(most_rows, num_rows - 1), neighbours)
        ways = [way for way in ways if way.strategies not in tried]
        way = max(ways, key=lambda each: each.worth, default=None)
        saved_seconds = found.prediction.step_seconds - best.prediction.step_seconds
        if way is None or seconds_per_row * way.worth <= saved_seconds:
            break
        tried.add(way.strategies)
        candidate = _recorded(way.strategies, recordings)
        if candidate is None:
            break
        kept_rows, kept_bytes = way.num_rows, candidate.peak_bytes
        best = min(best, candidate, key=_preferred)
    return best


def _ways(strategies: Strategies, most_rows: float, neighbours: Neighbours) -> list[_Kept]:
    """Return how to keep so many rows at most, in pieces as they are and in those of half the size.

    None is returned that keeps no piece.
    """
    found = []
    for members, worth_per_row in (
        (strategies, 1.0),
        (neighbours.halved(strategies), 1 / _WORTHWHILE),
    ):
        split = None if members is None else splitting_of(members)
        if members is None or split is None:
            continue
        num_pieces = int(most_rows // split.micro_batch_size)
        kept = split.keeping(num_pieces) if num_pieces > 0 else None
        if kept is not None:
            num_rows = num_pieces * split.micro_batch_size
            keeping = tuple(kept if member is split else member for member in members)
            found.append(_Kept(keeping, num_rows, worth_per_row * num_rows))
    return found


def _recorded(strategies: Strategies, recordings: Recordings) -> Candidate | None:
    """Record a combination; None if it cannot be, which refuses nothing: what is found can."""
    try:
        return recordings.in_full(strategies)
    except StrategyError:
        return None


def _preferred(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.prediction.fits, candidate.prediction.step_seconds
