"""How a run works through its centres: from the document's strategy names to a memfit plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memfit.errors import NoPlanFitsError
from memfit.job import Job
from memfit.strategies.loss_chunking import LossChunking
from memfit_workloads.planned_memory import PlannedMemory, devices, plan_memory

from .memory_estimate import strategy_by_thresholds
from .settings import StrategySettings, TrainingSettings

if TYPE_CHECKING:
    from memfit import Plan, Prediction

_CHUNKING = LossChunking.name


def plan_training(job: Job, settings: TrainingSettings, num_centres: int) -> PlannedMemory:
    """Find the plan that a run's strategy asks for.

    Args:
        job: what is trained, with the centres of this process.
        settings: what was asked for.
        num_centres: of this process.

    Raises:
        NoPlanFitsError: if no plan keeps the step inside the budget.
    """
    strategy = settings.strategy
    memory = replace(settings.memory_settings, num_steps=settings.num_steps)
    if memory.plan_file is None and strategy.name == "auto" and strategy.auto_policy != "planner":
        # Whether centres are shared among devices has been decided before.
        strategy = replace(strategy, name=chosen_by_thresholds(job, settings, num_devices=1))
    chunk = _fixed_chunk(strategy, num_centres)
    if memory.plan_file is None and (chunk is not None or strategy.name == "single_gpu"):
        return _as_told(job, settings, chunk)
    if strategy.name == "chunked":
        required = (*memory.require, _CHUNKING)
        memory = replace(memory, require=required)
    return plan_memory(job, memory)


def _fixed_chunk(strategy: StrategySettings, num_centres: int) -> int | None:
    """Return the centres at a time, where the flags say it."""
    if strategy.name == "gradient_accumulation":
        return -(-num_centres // min(strategy.accumulation_steps, num_centres))
    if strategy.chunk_size is not None:
        return min(strategy.chunk_size, num_centres)
    return None


def _as_told(job: Job, settings: TrainingSettings, chunk: int | None) -> PlannedMemory:
    """Predict a step whose chunk the flags say, without looking for a plan."""
    strategies = () if chunk is None else (LossChunking(num_candidates=chunk),)
    planned = plan_memory(job, settings.memory_settings, strategies)
    budget_bytes, needed_bytes = planned.budget_bytes, planned.planned.bounded_bytes()
    if budget_bytes is not None and needed_bytes > budget_bytes:
        remedy = (
            f"--strategy {settings.strategy.name} says how to train, so nothing else was tried: "
            "--strategy auto, or chunked without --chunk_size, looks for what fits."
        )
        raise NoPlanFitsError(
            budget_bytes,
            needed_bytes,
            planned.planned.bounded_parts(),
            planned.plan.labels(),
            (remedy,),
        )
    return planned


def chosen_by_thresholds(job: Job, settings: TrainingSettings, num_devices: int) -> str:
    """Name the strategy that the document would choose.

    Args:
        job: of all centres, or of those of one rank.
        settings: say on what device, and with what budget.
        num_devices: among which the centres may be shared.
    """
    import memfit
    from memfit.devices.catalogue import load_device

    _, device = devices(settings.memory_settings.device)
    plain = memfit.predict(job, device=device)
    memory_bytes = settings.memory_settings.budget_bytes or load_device(device).memory_bytes
    return strategy_by_thresholds(plain.bounded_bytes(), memory_bytes, num_devices)


def evaluation_chunk(plan: Plan, planned: Prediction, num_dimensions: int) -> int:
    """Return how many kernels are held at a time outside training: no more than training holds."""
    chunks = [s.num_candidates for s in plan.strategies if isinstance(s, LossChunking)]
    few = max(1, planned.peak_allocated_bytes // (64 * num_dimensions**2))
    return min([*chunks, few, 256])
