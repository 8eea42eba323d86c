"""Describes a plan that was found, while the search goes on."""

from __future__ import annotations

from memfit.figures import PlanSoFar
from memfit.planner.search.candidates import Candidate
from memfit.planner.search.recordings import Recordings


def plan_so_far(
    candidate: Candidate, recordings: Recordings, num_left: int, elapsed_seconds: float
) -> PlanSoFar:
    """Describe what was recorded last, beside the plain step.

    Args:
        candidate: the fastest that fits so far.
        recordings: the plain step's among them, which is the first.
        num_left: how many combinations may be faster.
        elapsed_seconds: since planning began.
    """
    first = next(iter(recordings.tried.values()))
    return PlanSoFar(
        strategies=tuple(strategy.label() for strategy in candidate.strategies),
        peak_bytes=candidate.peak_bytes,
        step_seconds=candidate.prediction.step_seconds,
        plain_step_seconds=first.prediction.step_seconds,
        num_recorded=len(recordings.tried),
        num_left=num_left,
        elapsed_seconds=elapsed_seconds,
    )
