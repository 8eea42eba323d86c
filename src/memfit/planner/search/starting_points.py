"""The combinations that a search begins with."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.figures import Prediction
from memfit.planner.search.candidates import Strategies
from memfit.planner.search.options import Choices
from memfit.planner.search.recordings import Recorded
from memfit.strategies.base import Strategy
from memfit.strategies.plan import conflict, in_catalogue_order


def beginnings(recorded: Recorded, choices: Choices) -> list[Strategies]:
    """Return the combinations to begin with: what is required, and what makes a step faster."""
    required = [options[0] for options in choices.fixed_size if options[0] is not None]
    root = in_catalogue_order(required)
    plain = recorded.of(root).prediction
    smaller, faster = list(root), list(root)
    for options in choices.fixed_size:
        wanted = [o for o in options if o is not None and o not in root and not o.never_faster]
        for option, alone in _alone(recorded, root, wanted):
            if not _is_better(alone, plain) or conflict([*faster, option]):
                continue
            faster.append(option)
            if alone.bounded_bytes() <= plain.bounded_bytes():
                smaller.append(option)
            break
    found = dict.fromkeys(in_catalogue_order(members) for members in (faster, smaller))
    return [strategies for strategies in found if recorded.attempt(strategies)] or [root]


def _alone(
    recorded: Recorded, root: Strategies, options: Iterable[Strategy]
) -> list[tuple[Strategy, Prediction]]:
    """Record options, each alone; the fastest first. Those that cannot apply are left out."""
    tried = [(option, recorded.attempt(in_catalogue_order((*root, option)))) for option in options]
    found = [(option, candidate) for option, candidate in tried if candidate is not None]
    found.sort(key=lambda entry: entry[1].cost)
    return [(option, candidate.prediction) for option, candidate in found]


def _is_better(prediction: Prediction, other: Prediction) -> bool:
    """Return whether something is faster, or as fast and smaller."""
    mine = (prediction.step_seconds, prediction.bounded_bytes())
    return mine < (other.step_seconds, other.bounded_bytes())
