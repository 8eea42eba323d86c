"""The plan of a run whose flags fix a part of it: the planner chooses the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import memfit
from memfit.errors import NoPlanFitsError
from memfit.job import Job, StepOrder
from memfit.strategies import CATALOGUE
from memfit.strategies.base import Strategy
from memfit.strategies.micro_batching import MicroBatching
from memfit_workloads.memory_settings import MemorySettings
from memfit_workloads.planned_memory import PlannedMemory, devices, most_seconds, plan_memory

_SPLITTERS = ("micro-batching", "cached-gradients", "batchnorm-replay")
_NEEDS_WHOLE_STEP = ("optimizer-in-backward",)
_MOST_TRIES = 4


def plan_training(
    job: Job,
    settings: MemorySettings,
    micro_batch_size: int | None,
    fixed: Sequence[Strategy] = (),
) -> PlannedMemory:
    """Find the plan to train under.

    With fixed micro-batches, the rest is planned for one of them, beside the gradients that the
    ones before have left, and the whole step is then predicted with all of it. Where that takes
    more than the budget, the piece is planned again with as much less. ``fixed`` strategies are
    part of the plan as they are; the planner chooses none that they exclude.

    Raises:
        NoPlanFitsError: if no plan keeps the step inside the budget.
    """
    is_free = micro_batch_size is None or micro_batch_size >= job.batch_size
    if settings.plan_file is not None or (is_free and not fixed):
        return plan_memory(job, settings)
    _, device = devices(settings.device)
    plain = memfit.predict(job, device=device)
    budget_bytes = settings.budget_beside(plain.bounded_bytes())
    piece, added, forbidden = job, [*fixed], [*settings.forbid, *_excluded(fixed)]
    if not is_free:
        assert micro_batch_size is not None, "else it is free"
        piece = replace(job, batch_size=micro_batch_size, order=StepOrder(keeps_gradients=True))
        added.append(MicroBatching(micro_batch_size=micro_batch_size))
        forbidden += [*_SPLITTERS, *_NEEDS_WHOLE_STEP]
    piece_budget_bytes = budget_bytes
    for _ in range(_MOST_TRIES):
        chosen = memfit.plan(
            piece,
            device=device,
            budget=piece_budget_bytes,
            allow=list(settings.allow),
            require=list(settings.require),
            forbid=forbidden,
            host_memory=settings.host_bytes,
            disk=settings.disk_bytes,
            processor_seconds=most_seconds(plain, settings.num_steps),
        ).unless_interrupted()
        planned = plan_memory(job, settings, _in_order((*chosen.strategies, *added)), plain)
        needed_bytes = planned.planned.bounded_bytes()
        if budget_bytes is None or piece_budget_bytes is None or needed_bytes <= budget_bytes:
            return planned
        piece_budget_bytes -= needed_bytes - budget_bytes
        if piece_budget_bytes <= 0:
            break
    assert budget_bytes is not None, "without one the first plan is returned"
    raise NoPlanFitsError(
        budget_bytes,
        needed_bytes,
        planned.planned.bounded_parts(),
        planned.plan.labels(),
        ("Lower --batch-size and raise --grad-accum-steps, which keeps the effective batch.",),
    )


def _in_order(strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    """Put strategies into the order of the catalogue, in which they are applied."""
    return tuple(sorted(strategies, key=lambda each: CATALOGUE.index(type(each))))


def _excluded(fixed: Sequence[Strategy]) -> list[str]:
    """Name what does not go with strategies of the plan, and these themselves."""
    names = {each.name for each in fixed}
    partners = {
        kind.name for kind in CATALOGUE if names & set(kind.excludes)
    } | {name for each in fixed for name in each.excludes}  # fmt: skip
    return sorted(partners | names)
