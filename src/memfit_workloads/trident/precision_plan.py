"""The plan of a run in which some parts of the model stay in float32 beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memfit.errors import NoPlanFitsError
from memfit.job import Job
from memfit.strategies.autocast import AbstractAutocast
from memfit.strategies.base import Strategy
from memfit_workloads.memory_settings import MemorySettings
from memfit_workloads.planned_memory import PlannedMemory, plan_memory

from .memory_plan import plan_training

_MOST_TRIES = 4


def plan_with_precision(
    job: Job,
    settings: MemorySettings,
    micro_batch_size: int | None,
    kept: Sequence[str],
    fixed: Sequence[Strategy] = (),
) -> PlannedMemory:
    """Find the plan to train under, and keep parts of the model out of its autocast.

    What is kept takes more than what the planner has looked at, so the step is predicted again with
    it, and planned again with as much less where that takes more than the budget.

    Raises:
        NoPlanFitsError: if no plan keeps the step inside the budget.
    """
    planned = plan_training(job, settings, micro_batch_size, fixed)
    if not kept:
        return planned
    budget_bytes = planned.budget_bytes
    smaller_bytes = budget_bytes
    for _ in range(_MOST_TRIES):
        found = plan_memory(job, settings, _keeping(planned.plan.strategies, kept))
        needed_bytes = found.planned.bounded_bytes()
        if budget_bytes is None or smaller_bytes is None or needed_bytes <= budget_bytes:
            return found
        smaller_bytes -= needed_bytes - budget_bytes
        if smaller_bytes <= 0:
            break
        smaller = replace(settings, budget_fraction=None, budget_bytes=smaller_bytes)
        planned = plan_training(job, smaller, micro_batch_size, fixed)
    assert budget_bytes is not None, "without one the first plan is returned"
    raise NoPlanFitsError(
        budget_bytes,
        needed_bytes,
        found.planned.bounded_parts(),
        found.plan.labels(),
        ("Leave fewer parts in fp32 with --precision, or raise the budget.",),
    )


def _keeping(strategies: Sequence[Strategy], kept: Sequence[str]) -> tuple[Strategy, ...]:
    """Have the strategy that chooses the type keep modules."""
    return tuple(
        replace(each, keep=tuple(kept)) if isinstance(each, AbstractAutocast) else each
        for each in strategies
    )
