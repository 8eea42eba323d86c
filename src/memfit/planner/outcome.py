"""Puts a plan together: what was chosen, what is safer, and what everything would cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memfit.devices.spec import Device
from memfit.figures import ParetoPoint
from memfit.planner.candidates import Candidate
from memfit.planner.choices import Choices
from memfit.planner.explanation import considered_plans, remedies
from memfit.planner.search import Search
from memfit.strategies.base import Numerics
from memfit.strategies.plan import Plan

_RUNGS = (0.85, 0.6)
"""Peaks of the safer plans, as shares of the chosen one's."""


def chosen_plan(
    device: Device, search: Search, best: Candidate, choices: Choices, note: str
) -> Plan:
    """Describe the chosen plan and what lies around it."""
    ladder = tuple(_plan_of(device, rung) for rung in _ladder(search, best))
    plain = search.tried[()].prediction if () in search.tried else best.prediction
    used = {strategy.name for strategy in best.strategies}
    refused = (*choices.refused, *(r for r in search.refused.items() if r[0] not in used))
    return Plan(
        strategies=best.strategies,
        device=device.name,
        numerics=Numerics(best.prediction.numerics),
        prediction=best.prediction,
        ladder=ladder,
        pareto=pareto(_points(search, best)),
        considered=considered_plans(search.tried.values(), best),
        remedies=remedies(plain, best.strategies, refused),
        refused=refused,
        notes=(note,) if note else (),
    )


def pareto(points: Iterable[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """Keep the points that no other beats, and the chosen one; the fastest first."""
    found: list[ParetoPoint] = []
    least_bytes: int | None = None
    for point in sorted(points, key=lambda p: (p.step_seconds, p.peak_bytes, not p.is_chosen)):
        if point.is_chosen or least_bytes is None or point.peak_bytes < least_bytes:
            found.append(point)
            least_bytes = min(point.peak_bytes, least_bytes or point.peak_bytes)
    return tuple(found)


def _points(search: Search, best: Candidate) -> Iterator[ParetoPoint]:
    """Yield everything that was recorded, and every refinement that was only estimated."""
    tried = search.tried | {best.strategies: best}
    for strategies, candidate in tried.items():
        yield ParetoPoint(
            strategies=tuple(strategy.label() for strategy in strategies),
            peak_bytes=candidate.prediction.bounded_bytes(),
            step_seconds=candidate.prediction.step_seconds,
            is_recorded=True,
            is_chosen=strategies == best.strategies,
        )
    for refinement in search.refinements():
        if refinement.strategies not in tried:
            yield ParetoPoint(
                strategies=tuple(strategy.label() for strategy in refinement.strategies),
                peak_bytes=refinement.peak_bytes,
                step_seconds=refinement.seconds,
                is_recorded=False,
                is_chosen=False,
            )


def _ladder(search: Search, best: Candidate) -> Iterator[Candidate]:
    """Yield ever smaller plans, each the fastest known of its size, each recorded."""
    last_bytes = best.prediction.bounded_bytes()
    for share in _RUNGS:
        most_bytes = int(share * best.prediction.bounded_bytes())
        if last_bytes <= most_bytes:
            continue
        rung = search.fastest_below(most_bytes)
        if rung is None or rung.prediction.bounded_bytes() >= last_bytes:
            return
        last_bytes = rung.prediction.bounded_bytes()
        yield rung


def _plan_of(device: Device, candidate: Candidate) -> Plan:
    return Plan(
        strategies=candidate.strategies,
        device=device.name,
        numerics=Numerics(candidate.prediction.numerics),
        prediction=candidate.prediction,
    )
