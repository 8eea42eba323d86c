"""Puts a result together: what was chosen, what is safer, and what everything would cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memfit.cost.operator_times import time_certainty
from memfit.devices.spec import CPU, Device
from memfit.figures import Approximation, Certainty, ParetoPoint, Refusal, RefusalKind
from memfit.planner.result.approximations import approximations, not_allowed
from memfit.planner.result.explanation import (
    considered_plans,
    held_at_peak,
    remedies,
    removed_alone,
)
from memfit.planner.result.front import pareto
from memfit.planner.result.ladder import Ladder
from memfit.planner.result.planning_result import PlanningResult
from memfit.planner.search.candidates import Candidate, Evaluator, Strategies
from memfit.planner.search.search import Search
from memfit.planner.search.tree import SearchTree
from memfit.prediction.predict import effect_notes
from memfit.prediction.process_memory import rules_of
from memfit.prediction.recording import Recording
from memfit.strategies.base import Numerics
from memfit.strategies.evidence import evidence_of
from memfit.strategies.plan import Plan
from memfit.units import format_seconds

_CALIBRATE = (
    "Step times are guesses for any processor: `memfit calibrate --device cpu` measures this one, "
    "in ten seconds, and plans are compared by that from then on."
)
_WORTH_A_NOTE = 0.01
"""The share of a step's time that what was not recorded has to promise before a note says so."""
_MOST_OPERATORS = 500
"""Where recording a step takes seconds, approximations that nobody asked for are not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSearch:
    """What a search was asked and how it ended."""

    device: Device
    plain: Recording
    evaluate: Evaluator
    search: Search
    is_measured: bool
    """Whether times were taken here; what is recorded afterwards has none to stand beside them."""

    def rungs(self, best: Candidate) -> list[Candidate]:
        """Find the safer plans below the chosen one."""
        return Ladder(self.search).below(best)

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
        held = held_at_peak(self.plain.steady, rules_of(self.device))
        removed = removed_alone(tried, search.space)
        return PlanningResult(
            **self._plan_fields(best),
            ladder=tuple(Plan(**self._plan_fields(rung)) for rung in rungs),
            pareto=pareto(_points(tried, search.tree, best)),
            considered=considered_plans(search.recordings.tried.values(), best),
            approximations=approximated,
            remedies=remedies(held, removed, best.strategies, refused),
            refused=refused,
            notes=tuple(notes),
            ended_early=search.is_over,
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
        if not is_wanted or self.search.is_over or not not_allowed(self.search.space):
            return (), []
        num_operators = max(len(self.plain.steady.operations), best.num_operators)
        if num_operators > _MOST_OPERATORS:
            note = (
                "What approximations would buy was not recorded, because recording a step takes "
                f"{format_seconds(self.plain.record_seconds)}. Plan with --allow NAME to see."
            )
            return (), [note]
        space, facts = self.search.space, self.plain.facts
        return approximations(self.evaluate, best.strategies, space, facts)


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
