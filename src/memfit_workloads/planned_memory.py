"""The plan that a workload is trained under, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memfit.job import Job
from memfit.units import format_bytes, format_fraction, format_seconds

from .memory_settings import MemorySettings

if TYPE_CHECKING:
    from rich.console import Console

    from memfit import Plan, Prediction
    from memfit.figures import ConsideredPlan
    from memfit.strategies.base import Strategy

_BFLOAT16_CAPABILITY = 8.0
_STEADY_UPDATES = 2
_SHARE_OF_TRAINING = 0.1
_LEAST_SECONDS = 10.0
"""What planning may take of the processor for a training that is shorter than its preparations."""
_SLOW = 10
"""How many times slower than no plan at all is worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFigures:
    """The plan that a run runs, and the figures it is held against."""

    plan: Plan
    plain: Prediction
    """What training would take as it is, without any strategy."""
    planned: Prediction
    budget_bytes: int | None
    run_device: str
    """``cpu`` or ``cuda``."""

    def to_json(self) -> dict[str, Any]:
        """Return what config.json and the result say of it."""
        return {
            "strategies": list(self.plan.labels()),
            "numerics": str(self.planned.numerics),
            "budget_bytes": self.budget_bytes,
            "plain_peak_bytes": self.plain.peak_allocated_bytes,
            "predicted_peak_bytes": self.planned.peak_allocated_bytes,
            "plain_step_seconds": self.plain.step_seconds,
            "predicted_step_seconds": self.planned.step_seconds,
        }

    @property
    def considered(self) -> Sequence[ConsideredPlan]:
        """Return the plans that were looked at; none where the plan was read from a file."""
        import memfit

        return self.plan.considered if isinstance(self.plan, memfit.PlanningResult) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory(PlannedFigures):
    """The same of a job, whose steps memfit runs itself."""

    job: Job


@contextmanager
def planning(console: Console) -> Iterator[None]:
    """Say what is done while a plan is looked for; Ctrl-C ends the command.

    Raises:
        KeyboardInterrupt: if it is interrupted.
    """
    try:
        with console.status("planning: recording steps, nothing is run yet; Ctrl-C ends it"):
            yield
    except KeyboardInterrupt:
        console.print("Interrupted while planning: nothing was trained or written.")
        raise


def most_seconds(plain: Prediction, num_steps: float | None) -> float | None:
    """Return how much of the processor planning may take: a tenth of what training is to take.

    Args:
        plain: what a step takes as it is.
        num_steps: how many will be trained; None where nobody knows, and then there is no bound.
    """
    if num_steps is None or not math.isfinite(num_steps):
        return None
    return max(_LEAST_SECONDS, _SHARE_OF_TRAINING * num_steps * plain.step_seconds)


def plan_memory(
    job: Job,
    settings: MemorySettings,
    strategies: Sequence[Strategy] | None = None,
    plain: Prediction | None = None,
) -> PlannedMemory:
    """Predict the job as it is, and find or read the plan that it is trained under.

    Args:
        job: what is trained.
        settings: how much memory it may take, and by which means.
        strategies: what the plan is, where it is to be neither found nor read.
        plain: the prediction of the job as it is, where that has been made.

    Raises:
        KeyboardInterrupt: if it is interrupted while a plan is looked for.
        NoPlanFitsError: if no plan keeps the step inside the budget.
        PlanFileError: if ``--plan`` cannot be read.
    """
    import memfit

    run_device, device = devices(settings.device)
    plain = plain or memfit.predict(job, device=device)
    budget_bytes = settings.budget_beside(plain.bounded_bytes())
    if strategies is not None:
        plan = memfit.Plan(strategies=tuple(strategies), device=device)
    elif settings.plan_file is not None:
        plan = memfit.Plan.load(settings.plan_file)
    else:
        plan = memfit.plan(
            job,
            device=device,
            budget=budget_bytes,
            allow=list(settings.allow),
            require=list(settings.require),
            forbid=list(settings.forbid),
            host_memory=settings.host_bytes,
            disk=settings.disk_bytes,
            processor_seconds=most_seconds(plain, settings.num_steps),
        ).unless_interrupted()
    # What a file says was predicted for other settings, perhaps.
    planned = plan.prediction if settings.plan_file is None else None
    if planned is None:
        planned = memfit.predict(job, device=device, plan=plan)
        plan = plan.with_prediction(planned)
    return PlannedMemory(
        job=job,
        plan=plan,
        plain=plain,
        planned=planned,
        budget_bytes=budget_bytes,
        run_device=run_device,
    )


def devices(name: str | None) -> tuple[str, str]:
    """Return where to run (``cpu`` or ``cuda``) and the catalogue's name for it.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
    """
    from memfit.devices.catalogue import current_device_name, load_device

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] == "cuda":
        return name, current_device_name()
    device = load_device(name)
    return device.kind, device.name


def has_bfloat16(device: str | None) -> bool:
    """Return whether a device computes in bf16: CPUs do, and GPUs from Ampere on.

    Source: CUDA C++ Programming Guide, arithmetic instructions, compute capability 8.0.
    """
    from memfit.devices.catalogue import load_device

    capability = load_device(devices(device)[1]).compute_capability
    return capability is None or float(capability) >= _BFLOAT16_CAPABILITY


def plan_lines(planned_memory: PlannedFigures) -> tuple[str, str]:
    """Say what training would take as it is, what it may take, and how it is run."""
    planned = planned_memory.planned
    budget_bytes = planned_memory.budget_bytes
    budget = "none" if budget_bytes is None else format_bytes(budget_bytes)
    plan = " + ".join(planned_memory.plan.labels()) or "as it is"
    peak = format_bytes(planned.peak_allocated_bytes)
    return (
        f"as it is: {format_bytes(planned_memory.plain.peak_allocated_bytes)}; budget: {budget}",
        f"plan: {plan} ({planned.numerics}); predicted peak {peak}{_against_plain(planned_memory)}",
    )


def _against_plain(planned_memory: PlannedFigures) -> str:
    """Say what the plan costs in time; nothing where there is none."""
    plain_seconds = planned_memory.plain.step_seconds
    seconds = planned_memory.planned.step_seconds
    if not planned_memory.plan.strategies or not plain_seconds:
        return ""
    change = f"{100 * (seconds / plain_seconds - 1):+.0f} %"
    return (
        f"; a step {format_seconds(seconds)}, as it is {format_seconds(plain_seconds)} ({change})"
    )


def show_plan(planned_memory: PlannedFigures, console: Console) -> None:
    """Print what training would take as it is, what it may take, and how it is run."""
    for line in (*plan_lines(planned_memory), *slow_lines(planned_memory)):
        console.print(line, markup=False, soft_wrap=True)


def slow_lines(planned_memory: PlannedFigures) -> tuple[str, ...]:
    """Warn of a plan that is many times slower than no plan, with what more memory would buy."""
    plain_seconds = planned_memory.plain.step_seconds
    seconds = planned_memory.planned.step_seconds
    budget_bytes = planned_memory.budget_bytes
    if budget_bytes is None or seconds < _SLOW * plain_seconds:
        return ()
    line = (
        f"slow: a step is predicted to take {seconds / plain_seconds:.0f} times as long as without "
        "a plan."
    )
    faster = [each for each in planned_memory.considered if each.step_seconds <= seconds / 2]
    if faster:
        least = min(faster, key=lambda each: each.peak_bytes)
        more = format_bytes(max(0, least.peak_bytes - budget_bytes))
        line += (
            f" {more} more budget, {format_bytes(least.peak_bytes)} in all, are enough for "
            f"{' + '.join(least.strategies) or 'no plan at all'}, which takes "
            f"{least.step_seconds / plain_seconds:.1f} times as long."
        )
    return (line,)


def peaks_line(planned_memory: PlannedFigures, measured_bytes: int | None) -> str:
    """Write predicted and measured peak of the whole training."""
    predicted_bytes = planned_memory.planned.peak_allocated_bytes
    peak = f"peak: predicted {format_bytes(predicted_bytes)}"
    if measured_bytes is not None:
        error = format_fraction(predicted_bytes / measured_bytes - 1)
        peak += f", measured {format_bytes(measured_bytes)} ({error})"
    return peak


def short_run_lines(planned_memory: PlannedFigures, num_updates: int) -> tuple[str, ...]:
    """Say why a run of less than two updates takes less than what is predicted of a step.

    Args:
        planned_memory: what was predicted.
        num_updates: how often the optimizer stepped; a gradient scaler may skip the first times.
    """
    if num_updates >= _STEADY_UPDATES:
        return ()
    planned = planned_memory.planned
    later, first = planned.peak_allocated_bytes, planned.first_step_peak_bytes
    if num_updates == 0:
        why = "no update was made, as the gradient scaler skipped them all"
    else:
        why = f"there was one update, and the first one is predicted to take {format_bytes(first)}"
    return (f"short run: {why}; {format_bytes(later)} are of steps whose optimizer has its states",)
