"""Searches the combinations: every peak comes from recording the planned step, none from a guess.

Time estimates only order the search. A combination is first tried on the whole batch; if that does
not fit, the micro-batch is halved until it does, because smaller micro-batches take less memory and
more time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.figures import Prediction
from memfit.planner.choices import Choice, Choices
from memfit.strategies.base import Strategy
from memfit.strategies.plan import conflict, in_catalogue_order

Strategies = tuple[Strategy, ...]
Evaluate = Callable[[Strategies], Prediction]

_LEAST_GAIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A combination and what recording it gave."""

    strategies: Strategies
    prediction: Prediction

    @property
    def cost(self) -> tuple[float, int, tuple[str, ...]]:
        """Order candidates: faster first, then smaller, then by name so that ties are settled."""
        labels = tuple(strategy.label() for strategy in self.strategies)
        seconds = self.prediction.step_seconds
        return (seconds, self.prediction.bounded_bytes(), (str(len(labels)), *labels))


class Search:
    """Find the fastest combination that fits."""

    def __init__(self, evaluate: Evaluate, choices: Choices) -> None:
        self._evaluate = evaluate
        self._choices = choices
        self.tried: dict[Strategies, Candidate] = {}

    def run(self) -> Candidate | None:
        """Give the fastest candidate that fits; None if none does."""
        best: Candidate | None = None
        for seconds, combination in self._ordered_combinations():
            if best is not None and seconds > best.prediction.step_seconds:
                break
            found = self._best_of(combination)
            if found is not None and (best is None or found.cost < best.cost):
                best = found
        return best

    def smallest(self) -> Candidate:
        """Give the smallest peak that can be reached, for when nothing fits.

        Takes the smallest candidate tried so far and halves its micro-batch on, as long as that
        gains something worth mentioning.
        """
        best = min(self.tried.values(), key=_peak_bytes)
        whole = tuple(member for member in best.strategies if member not in self._choices.splits)
        for split in self._choices.splits:
            further = in_catalogue_order([*whole, split])
            if further in self.tried or conflict(further):
                continue
            candidate = self._try(further)
            gained_bytes = _peak_bytes(best) - _peak_bytes(candidate)
            best = min(best, candidate, key=_peak_bytes)
            if gained_bytes < _LEAST_GAIN * _peak_bytes(best):
                break
        return best

    def _ordered_combinations(self) -> list[tuple[float, Strategies]]:
        """Order combinations by the time that their members take alone, multiplied."""
        plain = self._try(()).prediction.step_seconds
        kept = [self._undominated(options) for options in self._choices.fixed_size]
        choices = Choices(
            fixed_size=tuple(kept),
            splits=self._choices.splits,
            must_split=self._choices.must_split,
            refused=self._choices.refused,
        )
        ordered = []
        for combination in choices.combinations():
            ratios = (self._alone(member).prediction.step_seconds / plain for member in combination)
            ordered.append((plain * math.prod(ratios), combination))
        return sorted(ordered, key=lambda entry: (entry[0], len(entry[1])))

    def _undominated(self, options: Sequence[Choice]) -> tuple[Choice, ...]:
        """Drop the settings that are slower than another one and not smaller.

        Only for strategies whose settings compare alike in every combination.
        """
        if not all(option is None or option.compares_alone for option in options):
            return tuple(options)
        alone = {option: self._alone(option).prediction for option in options}

        def is_dominated(option: Choice) -> bool:
            mine = alone[option]
            return any(
                other.step_seconds < mine.step_seconds
                and other.bounded_bytes() <= mine.bounded_bytes()
                for other in alone.values()
            )

        return tuple(option for option in options if not is_dominated(option))

    def _best_of(self, combination: Strategies) -> Candidate | None:
        """Give the fastest candidate with this combination, split as little as needed."""
        splits = [split for split in self._choices.splits if not conflict([*combination, split])]
        if not self._choices.must_split:
            whole = self._try(combination)
            if whole.prediction.fits:
                return whole
        return self._least_split(combination, splits)

    def _least_split(self, combination: Strategies, splits: Sequence[Strategy]) -> Candidate | None:
        """Halve the micro-batch until the step fits, or until halving can no longer make it fit.

        Recording gets dearer with every halving, so the sizes are tried from the largest down. The
        peak is convex in the micro-batch (a maximum of sums that are linear in it), so the line
        through two sizes bounds every smaller one from below.
        """
        last_bytes: int | None = None
        for split in splits:
            candidate = self._try((*combination, split))
            if candidate.prediction.fits:
                return candidate
            peak_bytes = candidate.prediction.bounded_bytes()
            budget_bytes = candidate.prediction.budget_bytes
            if last_bytes is not None and 2 * peak_bytes - last_bytes > (budget_bytes or 0):
                return None
            last_bytes = peak_bytes
        return None

    def _alone(self, option: Choice) -> Candidate:
        return self._try(() if option is None else (option,))

    def _try(self, strategies: Strategies) -> Candidate:
        """Record a combination, once."""
        strategies = in_catalogue_order(strategies)
        if strategies not in self.tried:
            prediction = self._evaluate(strategies)
            self.tried[strategies] = Candidate(strategies=strategies, prediction=prediction)
        return self.tried[strategies]


def _peak_bytes(candidate: Candidate) -> int:
    return candidate.prediction.bounded_bytes()
