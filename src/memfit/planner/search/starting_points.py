"""The combinations that a search begins with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.planner.search.candidates import Candidate, Strategies
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.recordings import Recordings
from memfit.strategies.base import Strategy
from memfit.strategies.plan import conflict, in_catalogue_order


def likely_start(recordings: Recordings, space: SearchSpace) -> Strategies | None:
    """Return what the search is likely to begin with; None where the step fits as it is.

    It is to be recorded first, as the first plan is wanted soon.
    """
    root = in_catalogue_order(space.required)
    if recordings.of(root).prediction.fits:
        return None
    groups = _groups(space, root)
    together = _together(root, groups)
    recordings.expect([together, *_singles(root, groups)])
    return together


def starting_points(recordings: Recordings, space: SearchSpace) -> list[Strategies]:
    """Return the combinations to begin with: what is required, and what makes a step faster."""
    root = in_catalogue_order(space.required)
    plain = recordings.of(root)
    smaller, faster = list(root), list(root)
    groups = _groups(space, root)
    recordings.expect([*_singles(root, groups), _together(root, groups)])
    for wanted in groups:
        for option, alone in _alone(recordings, root, wanted):
            if alone.cost[:2] >= plain.cost[:2] or conflict([*faster, option]):
                continue
            faster.append(option)
            if alone.peak_bytes <= plain.peak_bytes:
                smaller.append(option)
            break
    found = dict.fromkeys(in_catalogue_order(members) for members in (faster, smaller))
    return [strategies for strategies in found if recordings.attempt(strategies)] or [root]


def _groups(space: SearchSpace, root: Strategies) -> list[list[Strategy]]:
    """Return the settings of each strategy that may make a step faster."""
    return [
        [o for o in options if o is not None and o not in root and not o.never_faster]
        for options in space.options
    ]


def _singles(root: Strategies, groups: Sequence[Sequence[Strategy]]) -> list[Strategies]:
    return [in_catalogue_order((*root, option)) for wanted in groups for option in wanted]


def _together(root: Strategies, groups: Sequence[Sequence[Strategy]]) -> Strategies:
    """Return the first setting of each at once, which is likely to be faster than any alone."""
    together = list(root)
    for wanted in groups:
        if wanted and not conflict([*together, wanted[0]]):
            together.append(wanted[0])
    return in_catalogue_order(together)


def _alone(
    recordings: Recordings, root: Strategies, options: Iterable[Strategy]
) -> list[tuple[Strategy, Candidate]]:
    """Record options, each alone; the fastest first. Those that cannot apply are left out."""
    tried = [(o, recordings.attempt(in_catalogue_order((*root, o)))) for o in options]
    found = [(option, candidate) for option, candidate in tried if candidate is not None]
    return sorted(found, key=lambda entry: entry[1].cost)
