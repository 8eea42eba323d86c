"""The combinations that a search begins with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memfit.planner.search.candidates import Candidate, Strategies
from memfit.planner.search.first_guess import quick_start
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.recordings import Recordings
from memfit.strategies.base import Strategy
from memfit.strategies.plan import conflict, in_catalogue_order

_MUCH_SLOWER = 1.005
"""As a multiple of the plain step: what is so much slower together with others is so alone."""


def likely_start(recordings: Recordings, space: SearchSpace) -> list[Strategies]:
    """Return what the search is likely to begin with, and what is likely to fit already.

    They are to be recorded first, as the first plan is wanted soon. Nothing is returned where the
    step fits as it is.
    """
    root = in_catalogue_order(space.required)
    plain = recordings.of(root)
    if plain.prediction.fits:
        return []
    groups = _groups(space, root)
    together = _together(root, groups)
    quick = quick_start(plain, together, plain.prediction.budget_bytes or 0, space)
    found = [together, *([] if quick is None else [quick])]
    last = _last_recorded(together, root)
    recordings.expect([*found, *_singles(root, groups, without=last)])
    return found


def starting_points(
    recordings: Recordings, space: SearchSpace, *, is_long: bool = False
) -> list[Strategies]:
    """Return the combinations to begin with: what is required, and what makes a step faster.

    Where recording takes long, nothing is recorded ahead that may turn out not to be wanted.
    """
    root = in_catalogue_order(space.required)
    plain = recordings.of(root)
    smaller, faster = list(root), list(root)
    groups = _groups(space, root)
    slower = _slower_by_what_others_take(recordings, root, groups, is_long=is_long)
    recordings.expect([*_singles(root, groups, without=slower), _together(root, groups)])
    for wanted in groups:
        for option, alone in _alone(recordings, root, [o for o in wanted if o != slower]):
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


def _singles(
    root: Strategies, groups: Sequence[Sequence[Strategy]], without: Strategy | None = None
) -> list[Strategies]:
    options = (option for wanted in groups for option in wanted if option != without)
    return [in_catalogue_order((*root, option)) for option in options]


def _last_recorded(together: Strategies, root: Strategies) -> Strategy | None:
    """Return the last of several settings that are recorded together; None of a single one."""
    added = [member for member in together if member not in root and member.is_recorded]
    return added[-1] if len(added) > 1 else None


def _slower_by_what_others_take(
    recordings: Recordings,
    root: Strategies,
    groups: Sequence[Sequence[Strategy]],
    *,
    is_long: bool,
) -> Strategy | None:
    """Return what makes a step much slower, as it takes longer with all others than they alone.

    That saves recording it alone.
    """
    together = _together(root, groups)
    last, known = _last_recorded(together, root), recordings.tried.get(together)
    if last is None or known is None:
        return None
    others = [each for each in together if each not in root and each != last]
    recordings.expect(in_catalogue_order((*root, each)) for each in others)
    if not is_long:
        recordings.expect([in_catalogue_order((*root, last))], is_sure=False)
    alone = [recordings.attempt(in_catalogue_order((*root, each))) for each in others]
    plain_seconds = recordings.of(root).prediction.step_seconds
    seconds = known.prediction.step_seconds
    for each in alone:
        if each is None:
            return None
        seconds *= plain_seconds / each.prediction.step_seconds
    return last if seconds > _MUCH_SLOWER * plain_seconds else None


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
