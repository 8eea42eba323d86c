"""Among how many processes the centres are shared, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memfit.errors import NoPlanFitsError
from memfit.units import format_bytes, format_seconds
from memfit_workloads.planned_memory import PlannedMemory, devices

from .memory_plan import chosen_by_thresholds, plan_training

if TYPE_CHECKING:
    from collections.abc import Callable

    from memfit import Job

    from .settings import TrainingSettings

MODEL_PARALLEL = "model_parallel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Among how many processes the centres are shared."""

    num_ranks: int = 1
    reason: str = ""
    """Why, where the flags leave it open."""
    alone: PlannedMemory | None = None
    """The plan for one process, where it was made to decide."""

    @property
    def line(self) -> str:
        """Say what was chosen, and why; nothing where the flags say it."""
        where = f"{self.num_ranks} ranks" if self.num_ranks > 1 else "one process"
        return f"--strategy auto: {where}; {self.reason}" if self.reason else ""


def num_devices(settings: TrainingSettings) -> int:
    """Return how many processes there may be: as the flags say, else one for each GPU."""
    run_device, _ = devices(settings.memory_settings.device)
    told = settings.strategy.num_ranks
    return told or (torch.cuda.device_count() if run_device == "cuda" else 1)


def sharing(settings: TrainingSettings, step_of: Callable[[int], tuple[Job, int]]) -> Sharing:
    """Decide whether the centres are shared among several devices.

    ``auto`` compares one device with all: what does not fit on one is shared, and on GPUs what is
    faster. Ranks on a CPU share its cores, so there only room counts.

    Args:
        settings: what was asked for.
        step_of: gives the step of the first of so many ranks, and how many centres are its own.
    """
    strategy, num_ranks = settings.strategy, num_devices(settings)
    is_open = strategy.name == "auto" and settings.memory_settings.plan_file is None
    if not is_open or num_ranks < 2:
        return Sharing()
    if strategy.auto_policy != "planner":
        name = chosen_by_thresholds(step_of(1)[0], settings, num_ranks)
        reason = f"the thresholds say {name}"
        return Sharing(num_ranks=num_ranks if name == MODEL_PARALLEL else 1, reason=reason)
    return _faster(settings, step_of, num_ranks)


def _faster(
    settings: TrainingSettings, step_of: Callable[[int], tuple[Job, int]], num_ranks: int
) -> Sharing:
    """Compare one device with all of them."""
    alone = _planned(settings, *step_of(1))
    if isinstance(alone, NoPlanFitsError):
        needed = format_bytes(alone.smallest_peak_bytes)
        return Sharing(num_ranks=num_ranks, reason=f"no plan fits on one device ({needed})")
    if devices(settings.memory_settings.device)[0] != "cuda":
        reason = "it fits into one process, with whose cores ranks would do no more"
        return Sharing(reason=reason, alone=alone)
    shared = _planned(settings, *step_of(num_ranks))
    seconds = alone.planned.step_seconds
    if isinstance(shared, NoPlanFitsError) or shared.planned.step_seconds >= seconds:
        return Sharing(reason=f"{format_seconds(seconds)} a step is fastest", alone=alone)
    shown = f"{format_seconds(shared.planned.step_seconds)} a step, {format_seconds(seconds)}"
    reason = f"predicted {shown} on one device; what ranks exchange is not in it"
    return Sharing(num_ranks=num_ranks, reason=reason)


def _planned(settings: TrainingSettings, job: Job, num_own: int) -> PlannedMemory | NoPlanFitsError:
    try:
        return plan_training(job, settings, num_own)
    except NoPlanFitsError as error:
        return error
