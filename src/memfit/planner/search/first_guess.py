"""Guesses what would fit for a first plan: blocks to recompute, and pieces of a batch.

The search would come to pieces step by step, and where a step takes seconds to record, in minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memfit.planner.search.candidates import Candidate, Refinement, Strategies
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.pieces import lasting_bytes
from memfit.strategies.base import AbstractSplitting
from memfit.strategies.plan import conflict, in_catalogue_order
from memfit.trace.events import Category, Phase

SPARING = 0.95
"""Of the budget: what is estimated to take no more is all but sure to fit."""
_MOST_SIZES = 2
_WITH_BATCH_WHOLE = 0.5
"""What pieces of representations need of their share: most losses compare two of each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceGuess:
    """A combination that is likely to fit, with the pieces that it cuts the batch into."""

    strategies: Strategies
    seconds: float
    """Of the same on the whole batch, at least."""


def _estimated_bytes(refinement: Refinement) -> int:
    return refinement.peak_bytes


def likely_to_fit(
    candidate: Candidate,
    budget_bytes: int,
    expected_bytes: Callable[[Refinement], int] = _estimated_bytes,
) -> Refinement | None:
    """Return the fastest refinement that fits by its estimate with room to spare, or at all."""
    for most_bytes in (SPARING * budget_bytes, budget_bytes):
        enough = [each for each in candidate.refinements if expected_bytes(each) <= most_bytes]
        if enough:
            return min(enough, key=lambda each: each.seconds)
    return None


def quick_start(
    root: Candidate, together: Strategies, budget_bytes: int, space: SearchSpace
) -> Strategies | None:
    """Return a combination that is likely to fit, by what is known before a second recording.

    It recomputes blocks, and takes what changes nothing that is known of them; None if that is not
    estimated to do.

    Args:
        root: the step with what is required only.
        together: what the search is likely to begin with.
        budget_bytes: what the peak must not exceed.
        space: what may be combined.
    """
    enough = likely_to_fit(root, budget_bytes)
    if enough is None or not space.allows(enough.strategies):
        return None
    harmless = [m for m in together if not m.is_recorded or m.acts_in == (Phase.OPTIMIZER,)]
    found = in_catalogue_order([*dict.fromkeys((*enough.strategies, *harmless))])
    return None if conflict(found) else found


def piece_guesses(root: Candidate, alone: list[Candidate], space: SearchSpace) -> list[PieceGuess]:
    """Return the largest pieces that may fit with each strategy, and the next size, in that order.

    The fastest strategies come first. Parameters, what the optimizer keeps and gradients stay, and
    the rest of the smallest peak is taken to shrink with the pieces. That is too little where the
    peak is reached before there are gradients.

    Args:
        root: what a search begins with, on the whole batch.
        alone: the step with one strategy each, whose smallest peaks are known.
        space: what may be combined.
    """
    found = [*_of(root, root.strategies, root.prediction.step_seconds, space)]
    plain = next((each for each in alone if not each.strategies), root)
    for each in alone:
        added = [member for member in each.strategies if member not in root.strategies]
        if not added or conflict([*root.strategies, *added]):
            continue
        if each.floor_bytes >= root.floor_bytes:
            continue  # pieces alone are as small
        ratio = each.prediction.step_seconds / plain.prediction.step_seconds
        seconds = root.prediction.step_seconds * ratio
        found += _of(each, in_catalogue_order((*root.strategies, *added)), seconds, space)
    return sorted(found, key=lambda guess: guess.seconds)


def bytes_in_pieces(whole: Candidate, peak_bytes: int, share: float) -> int:
    """Estimate the peak of pieces of a share of the size, by a peak of the whole batch."""
    kept_bytes = lasting_bytes(whole) + _gradient_bytes(whole)
    return kept_bytes + int(share * max(0, peak_bytes - kept_bytes))


def _of(
    whole: Candidate, strategies: Strategies, seconds: float, space: SearchSpace
) -> Iterator[PieceGuess]:
    """Yield the largest pieces that may fit, by what a step takes on the whole batch."""
    prediction = whole.prediction
    budget_bytes, num_samples = prediction.budget_bytes, prediction.batch_size
    stays_bytes = lasting_bytes(whole)
    if not (budget_bytes and num_samples and stays_bytes) or any(
        isinstance(member, AbstractSplitting) for member in strategies
    ):
        return
    kept_bytes = stays_bytes + _gradient_bytes(whole)
    passing_bytes = max(0, whole.floor_bytes - kept_bytes)
    num_found = 0
    for split in space.splits:
        share = split.micro_batch_size / num_samples
        if split.keeps_batch_whole:
            share *= _WITH_BATCH_WHOLE
        if kept_bytes + passing_bytes * share > budget_bytes:
            continue
        combined = in_catalogue_order((*strategies, split))
        if not conflict(combined) and space.obstacle([split]) is None:
            yield PieceGuess(strategies=combined, seconds=seconds)
            num_found += 1
        if num_found == _MOST_SIZES:
            return


def _gradient_bytes(whole: Candidate) -> int:
    """Bound what gradients take: optimizers keep as much for each, or nothing at all."""
    known = whole.prediction.by_category
    parameter_bytes = known.get(Category.PARAMETERS.value, 0)
    return min(parameter_bytes, known.get(Category.OPTIMIZER_STATE.value, 0) or parameter_bytes)
