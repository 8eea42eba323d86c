"""Puts a result together: what was chosen, what is safer, and what everything would cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from memfit.allocator.simulate import alive_at_peak
from memfit.cost.operator_times import time_certainty
from memfit.devices.spec import CPU, Device
from memfit.errors import StrategyError
from memfit.figures import (
    Approximation,
    Certainty,
    ConsideredPlan,
    ParetoPoint,
    Refusal,
    RefusalKind,
    Remedy,
)
from memfit.planner.result.front import pareto
from memfit.planner.result.ladder import Ladder
from memfit.planner.result.planning_result import PlanningResult, over_budget
from memfit.planner.search.candidates import Candidate, Evaluator, Strategies
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.search import Search
from memfit.planner.search.tree import SearchTree
from memfit.prediction.predict import effect_notes
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import Recording
from memfit.strategies import CATALOGUE, strategy_class
from memfit.strategies.base import Numerics, Strategy
from memfit.strategies.evidence import evidence_of
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import Plan, conflict, in_catalogue_order
from memfit.trace.events import Category, Phase
from memfit.units import format_seconds

_CALIBRATE = (
    "Step times are guesses for any processor: `memfit calibrate --device cpu` measures this one, "
    "in ten seconds, and plans are compared by that from then on."
)
_WORTH_A_NOTE = 0.01
"""The share of a step's time that what was not recorded has to promise before a note says so."""
_MOST_OPERATORS = 500
"""Where recording a step takes seconds, approximations that nobody asked for are not recorded."""
_MOST_RECORDINGS = 4
_Held = Mapping[tuple[Category, Phase], int]
"""The bytes that live at a step's peak, by what they are for and by the part that made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSearch:
    """What a search was asked and how it ended."""

    device: Device
    plain: Recording
    evaluate: Evaluator
    search: Search
    is_measured: bool
    """Whether times were taken here; what is recorded afterwards has none to stand beside them."""

    def with_rungs(self, best: Candidate) -> tuple[Candidate, list[Candidate]]:
        """Return the chosen plan and the safer ones below it, none if that is interrupted.

        Where one of those turns out to be the fastest of all, it is chosen.
        """
        ladder, rungs = Ladder(self.search), list[Candidate]()
        try:
            rungs = ladder.below(best)
            while not self.is_measured and (faster := self.search.fastest_recorded()) is not best:
                assert faster is not None, "one is there already"
                best, rungs = faster, ladder.below(faster)
        except KeyboardInterrupt:
            self.search.patience.interrupt()
        return best, rungs

    def result(self, best: Candidate, rungs: Sequence[Candidate]) -> PlanningResult:
        """Describe the chosen plan and what lies around it."""
        search, used = self.search, {strategy.name for strategy in best.strategies}
        left_out = self._left_out(best)
        tried = search.recordings.tried | {best.strategies: best}
        approximated, notes = self._approximations(best)
        failed = search.recordings.refused.items()
        refused = (
            *search.space.all_refused(),
            *(
                Refusal(kind=RefusalKind.FAILED, strategy=name, sentence=reason)
                for name, reason in failed
                if name not in used
            ),
        )
        notes += self.plain.notes
        notes += [f"{each}." for each in effect_notes(self.plain)]
        notes += left_out
        notes += [f"{name}, in some plans: {why}" for name, why in failed if name in used]
        notes += self._guessed_times()
        held: Counter[tuple[Category, Phase]] = Counter()
        for index, num_bytes in alive_at_peak(self.plain.steady, rules_of(self.device)):
            allocation = self.plain.steady.allocations[index]
            held[allocation.category, allocation.phase] += num_bytes
        removed = _removed_alone(tried, search.space)
        return PlanningResult(
            **self._plan_fields(best),
            ladder=tuple(Plan(**self._plan_fields(rung)) for rung in rungs),
            pareto=pareto(_points(tried, search.tree, best)),
            considered=considered_plans(search.recordings.tried.values(), best),
            approximations=approximated,
            remedies=_remedies(held, removed, best.strategies, refused),
            refused=refused,
            notes=tuple(notes),
            ended_early=search.is_over,
            was_interrupted=search.patience.is_interrupted,
        )

    def _plan_fields(self, candidate: Candidate) -> dict[str, Any]:
        """Return what a plan says of itself."""
        proof, reasons = evidence_of(candidate.strategies, self.plain.facts)
        return {
            "strategies": candidate.strategies,
            "device": self.device.name,
            "numerics": Numerics(candidate.prediction.numerics),
            "proof": proof,
            "reasons": reasons,
            "prediction": candidate.prediction,
        }

    def _left_out(self, best: Candidate) -> list[str]:
        """Return how much faster what was not recorded could be."""
        if self.search.is_over:
            return [self._ended_early()]
        left_seconds, seconds = self.search.least_seconds_left, best.prediction.step_seconds
        if left_seconds is None or left_seconds >= seconds * (1 - _WORTH_A_NOTE):
            return []
        note = (
            "Recording this step takes long, so not every combination was recorded. By the "
            f"estimates, what was left out is at most {1 - left_seconds / seconds:.0%} faster. "
            "Plan with --thorough to see."
        )
        return [note]

    def _guessed_times(self) -> list[str]:
        """Say how to have better times, where a processor's are guesses and a few seconds help."""
        times = time_certainty(self.plain.steady, self.device)
        if self.is_measured or self.device.kind != CPU or times is not Certainty.GUESS:
            return []
        return [_CALIBRATE]

    def _ended_early(self) -> str:
        """Say that the search did not come to its end, and what it left."""
        search = self.search
        after = format_seconds(search.patience.elapsed_seconds)
        num_recorded, num_left = len(search.recordings.tried), search.num_left
        ended = "was interrupted" if search.patience.is_interrupted else "ended"
        return (
            f"Planning {ended} after {after}: this is the fastest of {num_recorded} plans that "
            f"were recorded. {num_left} more may be faster, by their estimates, and smaller plans "
            "to fall back on were not looked for."
        )

    def _approximations(self, best: Candidate) -> tuple[tuple[Approximation, ...], list[str]]:
        """Record what approximations would buy where that is quick; return notes as well."""
        is_wanted = not self.is_measured and best.prediction.fits is not False
        if not is_wanted or self.search.is_over or not _not_allowed(self.search.space):
            return (), []
        num_operators = max(len(self.plain.steady.operations), best.num_operators)
        if num_operators > _MOST_OPERATORS:
            note = (
                "What approximations would buy was not recorded, because recording a step takes "
                f"{format_seconds(self.plain.record_seconds)}. Plan with --allow NAME to see."
            )
            return (), [note]
        space, facts = self.search.space, self.plain.facts
        return _approximations(self.evaluate, best.strategies, space, facts)


def _points(
    tried: Mapping[Strategies, Candidate], tree: SearchTree, best: Candidate
) -> Iterator[ParetoPoint]:
    """Yield everything that was recorded, and every refinement that was only estimated."""
    for strategies, candidate in tried.items():
        yield ParetoPoint(
            strategies=tuple(strategy.label() for strategy in strategies),
            peak_bytes=candidate.peak_bytes,
            step_seconds=candidate.prediction.step_seconds,
            is_recorded=True,
            is_chosen=strategies == best.strategies,
        )
    for node, refinement in tree.refinements():
        if refinement.strategies not in tried:
            yield ParetoPoint(
                strategies=tuple(strategy.label() for strategy in refinement.strategies),
                peak_bytes=node.expected_bytes(refinement),
                step_seconds=refinement.seconds,
                is_recorded=False,
                is_chosen=False,
            )


def _not_allowed(space: SearchSpace) -> list[str]:
    """Name the strategies that were left out because they change the results.

    Those that train another problem are left to who asks for them.
    """
    left_out = (each.strategy for each in space.refused if each.kind is RefusalKind.NOT_ALLOWED)
    return [name for name in left_out if strategy_class(name).numerics is not Numerics.DIFFERENT]


def _approximations(
    evaluate: Evaluator, chosen: Strategies, space: SearchSpace, facts: JobFacts
) -> tuple[tuple[Approximation, ...], list[str]]:
    """Record the chosen plan with each strategy that was not allowed, in its mildest setting.

    What excludes it is left out, unless it was required.

    Returns:
        What was recorded, the fastest first, and a sentence for each that could not be.
    """
    found: list[Approximation] = []
    failures: list[str] = []
    wanted = [
        (setting, in_catalogue_order([*(s for s in chosen if not conflict([s, setting])), setting]))
        for setting in islice(_mildest_settings(space, facts), _MOST_RECORDINGS)
    ]
    if evaluate.ahead is not None:
        evaluate.ahead.expect([strategies for _, strategies in wanted])
    for setting, strategies in wanted:
        try:
            prediction = evaluate.once_expected(strategies).prediction
        except StrategyError as error:
            failures.append(f"--allow {setting.name} was tried: {error.reason}")
            continue
        found.append(
            Approximation(
                allow=setting.name,
                strategies=tuple(strategy.label() for strategy in strategies),
                peak_bytes=prediction.bounded_bytes(),
                step_seconds=prediction.step_seconds,
            )
        )
    found.sort(key=lambda approximation: approximation.step_seconds)
    return tuple(found), failures


def _mildest_settings(space: SearchSpace, facts: JobFacts) -> Iterator[Strategy]:
    """Yield the first setting of each strategy that can apply beside what was required."""
    for name in _not_allowed(space):
        settings = strategy_class(name).options(facts)
        setting = next((s for s in settings if s.obstacle(facts) is None), None)
        if setting is not None and not conflict([*space.required, setting]):
            yield setting


def considered_plans(tried: Iterable[Candidate], best: Candidate) -> tuple[ConsideredPlan, ...]:
    """List every plan that was recorded, the chosen one first, then by time."""
    ordered = sorted(
        tried, key=lambda candidate: (candidate.strategies != best.strategies, candidate.cost)
    )
    return tuple(
        ConsideredPlan(
            strategies=tuple(strategy.label() for strategy in candidate.strategies),
            numerics=candidate.prediction.numerics,
            peak_bytes=candidate.peak_bytes,
            step_seconds=candidate.prediction.step_seconds,
            fits=bool(candidate.prediction.fits),
            chosen=candidate.strategies == best.strategies,
            reason=_reason(candidate, best),
        )
        for candidate in ordered
    )


def _remedies(
    held: _Held, removed: Mapping[str, int], chosen: Sequence[Strategy], refused: Sequence[Refusal]
) -> tuple[Remedy, ...]:
    """Get what each strategy can take off the plain step's peak allocated at most, the most first.

    One that acts on nothing that lives there, but on what the allocator keeps unused, has no place.

    Args:
        held: what lives at that peak.
        removed: what strategies were seen to take off it, by name.
        chosen: the strategies of the chosen plan.
        refused: why others were left out.
    """
    used = {strategy.name for strategy in chosen}
    reasons = {refusal.strategy: refusal.sentence for refusal in refused}
    # At the peak a strategy removes no more than what lies there of the kinds that it acts on;
    # another moment may then become the peak.
    found = [
        Remedy(
            strategy=strategy.name,
            most_bytes=removed.get(
                strategy.name,
                sum(
                    int(num_bytes * strategy.acts_on.get(category, 0.0))
                    for (category, phase), num_bytes in held.items()
                    if category is not Category.TEMPORARIES or phase in strategy.acts_in
                ),
            ),
            is_recorded=strategy.name in removed,
            state="used" if strategy.name in used else reasons.get(strategy.name, "not needed"),
        )
        for strategy in CATALOGUE
        if strategy.acts_on
    ]
    return tuple(sorted(found, key=lambda remedy: (-remedy.most_bytes, remedy.strategy)))


def _removed_alone(tried: Mapping[Strategies, Candidate], space: SearchSpace) -> dict[str, int]:
    """Return what strategies take off the plain peak, where each setting was recorded alone."""
    if () not in tried:
        return {}
    plain_bytes = tried[()].prediction.peak_allocated_bytes
    found: dict[str, int] = {}
    for options in (*space.options, space.splits):
        settings = [option for option in options if option is not None]
        alone = [tried[setting,] for setting in settings if (setting,) in tried]
        if alone and len(alone) == len(settings):
            least_bytes = min(candidate.prediction.peak_allocated_bytes for candidate in alone)
            found[settings[0].name] = max(0, plain_bytes - least_bytes)
    return found


def _reason(candidate: Candidate, best: Candidate) -> str:
    """Say in a few words what became of a plan."""
    if candidate.strategies == best.strategies:
        is_too_large = best.prediction.fits is False
        return "the smallest that was reached" if is_too_large else "the fastest that fits"
    prediction = candidate.prediction
    budget_bytes = prediction.budget_bytes or 0
    if not prediction.fits:
        return over_budget(candidate.peak_bytes - budget_bytes)
    slower_seconds = prediction.step_seconds - best.prediction.step_seconds
    if slower_seconds > 0:
        return f"slower by {format_seconds(slower_seconds)} a step"
    return "about as fast, and not sought further"
