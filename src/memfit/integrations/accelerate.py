"""Fits a loop of Accelerate into its memory: one call takes the place of its forward and update.

Accelerate divides every loss by ``gradient_accumulation_steps`` and resets its count at the end of
a loader, so that a short last window is too small. Here a batch is cut inside the step instead, and
weights its pieces exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from memfit.errors import MemfitError
from memfit.integrations.batches import num_rows, resized
from memfit.job import Job, Total
from memfit.planner.planning import plan as plan_job
from memfit.runtime.run import Run
from memfit.runtime.start import start
from memfit.strategies.plan import Plan

__all__ = ["fit"]

_ENGINES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


def fit(
    accelerator: Any,
    model: torch.nn.Module,
    optimizer: Any,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor | Total],
    batch: Any,
    *,
    budget: str | int | None = None,
    allow: Sequence[str] = (),
    forbid: Sequence[str] = (),
    plan: Plan | None = None,
    device: str = "cpu",
    clip_grad_norm: float | None = None,
    guard: bool = True,
    folder: str | Path | None = None,
) -> Run:
    """Plan the step of a loop, and give what runs it: ``run.step(batch)`` for each batch.

    That is forward, ``accelerator.backward``, clipping, ``optimizer.step`` and ``zero_grad`` of a
    loop, for the whole batch, however it is cut. Schedulers are stepped behind it as ever.

    Args:
        accelerator: that has prepared the model and the optimizer.
        model: as ``accelerator.prepare`` gives it.
        optimizer: as ``accelerator.prepare`` gives it.
        loss: ``(model, batch)``, the mean over the batch, or ``memfit.Total(sum, count)``.
        batch: the largest that there is.
        budget: bytes, or a size such as ``"2GiB"``; None means the memory of the device.
        allow: strategies, or classes of numerics, that may change the results.
        forbid: strategies that the plan may not have.
        plan: to run under, instead of one that is made here.
        device: from ``memfit devices``, whose memory and speed are planned for.
        clip_grad_norm: to which the norm of the gradients is clipped; None clips nothing.
        guard: whether a step that runs out of memory is undone and run again.
        folder: of the run's journal; None for none.

    Raises:
        MemfitError: if the loop cannot be planned, with the reason.
        NoPlanFitsError: if no plan fits.
    """
    _check_supported(accelerator)
    owner = getattr(optimizer, "optimizer", optimizer)

    def living(_also: Any = accelerator) -> torch.nn.Module:
        return model

    job = Job(
        model=living,
        batch=lambda size: resized(batch, size),
        loss=loss,
        optimizer=lambda _: owner,
        batch_size=num_rows(batch),
        clip_grad_norm=clip_grad_norm,
        name=type(model).__name__,
    )
    if plan is None:
        forbidden = [*dict.fromkeys((*forbid, "eight-bit-optimizer", "optimizer-offload"))]
        plan = plan_job(job, device, budget, allow=allow, forbid=forbidden)
    return start(job, plan, device=accelerator.device.type, guard=guard, folder=folder)


def _check_supported(accelerator: Any) -> None:
    """Refuse loops that an engine steps, or that accumulate or scale losses themselves.

    Raises:
        MemfitError: with the reason and what there is instead.
    """
    kind = accelerator.distributed_type.name
    reason = ""
    if kind in _ENGINES:
        reason = f"under {kind} an engine of its own steps. memfit.start runs FSDP2 itself"
    elif accelerator.num_processes > 1:
        reason = "it runs in several processes. memfit.start takes a model in DDP"
    elif accelerator.gradient_accumulation_steps != 1:
        reason = (
            f"gradient_accumulation_steps is {accelerator.gradient_accumulation_steps}, by which "
            "Accelerate divides every loss. Set 1, and give the whole effective batch to run.step"
        )
    elif accelerator.scaler is not None:
        reason = (
            'mixed_precision="fp16" scales losses in accelerator.backward. Use "bf16", or "no" '
            'with allow=["fp16"]'
        )
    if reason:
        msg = f"This loop cannot be planned: {reason}."
        raise MemfitError(msg)
