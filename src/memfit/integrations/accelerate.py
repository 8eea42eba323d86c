"""Fits a loop of Accelerate into its memory: one call takes the place of its forward and update.

Accelerate divides every loss by ``gradient_accumulation_steps`` and resets its count at the end of
a loader, so that a short last window is too small. Here a batch is cut inside the step instead, and
weights its pieces exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memfit.errors import MemfitError, OtherRankError
from memfit.integrations.batches import num_rows, resized
from memfit.job import Job, Total
from memfit.observe.starting import rank_here
from memfit.planner.planning import plan as plan_job
from memfit.runtime.data_parallel import unwrapped
from memfit.runtime.run import Run
from memfit.runtime.start import start
from memfit.strategies.plan import Plan

__all__ = ["fit"]

_NOT_OFFERED = ("eight-bit-optimizer", "optimizer-offload")
_ALONE, _DATA_PARALLEL, _FSDP = {"NO"}, {"MULTI_CPU", "MULTI_GPU"}, "FSDP"


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

    Of several processes each calls this, with a batch of its own. A model in
    ``DistributedDataParallel`` is planned for as on one device, by the first process for all. A
    model that ``fsdp_version=2`` has sharded is run as it is, or under the plan that is given. A
    mean loss is averaged over the processes, a ``memfit.Total`` by the counts of all.

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
    # ``fully_shard`` has taken the parameters.
    if plan is None and any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        if budget is not None:
            msg = (
                "A budget was given, and a model that is sharded already cannot be planned for. "
                "Give plan=..., made for a job whose model function calls fully_shard."
            )
            raise MemfitError(msg)
        plan = Plan()
    elif plan is None:
        averaged = ("optimizer-in-backward",) if accelerator.num_processes > 1 else ()
        forbidden = [*dict.fromkeys((*forbid, *_NOT_OFFERED, *averaged))]
        whole = replace(job, model=lambda: unwrapped(model))
        plan = _of_first_process(
            lambda: plan_job(
                whole, device, budget, allow=allow, forbid=forbidden
            ).unless_interrupted()
        )
    return start(job, plan, device=accelerator.device.type, guard=guard, folder=folder)


def _of_first_process(make: Callable[[], Plan]) -> Plan:
    """Make a plan in the first process, for all.

    Raises:
        MemfitError: in all processes, if there is none.
    """
    rank, num_ranks = rank_here()
    if num_ranks == 1:
        return make()
    found: list[Plan | MemfitError | None] = [None]
    if rank == 0:
        try:
            found = [make()]
        except MemfitError as error:
            found = [error]
    said = [str(found[0]) if isinstance(found[0], MemfitError) else found[0]]
    dist.broadcast_object_list(said)
    if isinstance(found[0], MemfitError):
        raise found[0]
    if isinstance(said[0], str):
        raise OtherRankError(f"it could not make a plan: {said[0]}")
    assert isinstance(said[0], Plan), "a plan or an error was made"
    return said[0]


def _check_supported(accelerator: Any) -> None:
    """Refuse loops that an engine steps, or that accumulate or scale losses themselves.

    Raises:
        MemfitError: with the reason and what there is instead.
    """
    kind = accelerator.distributed_type.name
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    reason = ""
    if kind == "DEEPSPEED":
        reason = "an engine of DeepSpeed steps. memfit.integrations.deepspeed runs one exactly"
    elif kind == _FSDP and getattr(plugin, "fsdp_version", 1) != 2:
        reason = "fsdp_version is 1, whose shards no other code can clip or count. Set 2"
    elif kind not in {*_ALONE, *_DATA_PARALLEL, _FSDP}:
        reason = f"under {kind} an engine of its own steps. memfit.start runs FSDP2 and DDP itself"
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
