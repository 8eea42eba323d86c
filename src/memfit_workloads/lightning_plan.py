"""The plan of a workload that trains under Lightning."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

import memfit
from memfit.integrations.lightning import plan, predict

from .lightning_messages import quiet_lightning
from .memory_settings import MemorySettings
from .planned_memory import PlannedFigures, devices, most_seconds


def plan_under_lightning(
    memory_settings: MemorySettings,
    trainer: Callable[[], Trainer],
    module: LightningModule,
    data: LightningDataModule,
    *,
    as_it_is: bool = False,
) -> PlannedFigures:
    """Predict training as it is, and find or read the plan that it is run under.

    Args:
        memory_settings: how much memory training may take, and by which means.
        trainer: returns a Trainer like the one that trains.
        module: with all unfrozen that ever learns.
        data: that is trained on.
        as_it_is: whether training runs without a plan where nothing asks for one.

    Raises:
        NoPlanFitsError: if no plan keeps an update inside the budget.
        PlanFileError: if ``--plan`` cannot be read.
    """
    run_device, device = devices(memory_settings.device)
    with quiet_lightning():
        asked = trainer()
        plain = predict(asked, module, data, device=device)
        budget_bytes = memory_settings.budget_beside(plain.bounded_bytes())
        asks = budget_bytes is not None or memory_settings.allow or memory_settings.require
        if memory_settings.plan_file is not None:
            found: memfit.Plan = memfit.Plan.load(memory_settings.plan_file)
            # What a file says was predicted for other settings, perhaps.
            planned = predict(trainer(), module, data, plan=found, device=device)
            found = found.with_prediction(planned)
        elif as_it_is and not asks:
            planned = plain
            found = memfit.Plan(device=device).with_prediction(plain)
        else:
            found = plan(
                trainer(),
                module,
                data,
                device=device,
                budget=budget_bytes,
                allow=list(memory_settings.allow),
                require=list(memory_settings.require),
                processor_seconds=most_seconds(plain, asked.estimated_stepping_batches),
            ).unless_interrupted()
            planned = found.prediction or predict(
                trainer(), module, data, plan=found, device=device
            )
    return PlannedFigures(
        plan=found,
        plain=plain,
        planned=planned,
        budget_bytes=budget_bytes,
        run_device=run_device,
    )
