"""The job of a sharded model with the model left whole, for what is proved on recorded steps.

Whether pieces of a batch keep the results does not depend on where parameters lie, and a step that
exchanges shards cannot be recorded without the other ranks.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from memfit.job import Job


def whole_job(job: Job, living: torch.nn.Module) -> Job:
    """Return a job like another, whose model is taken apart from FSDP2 once it is built.

    Args:
        job: of the training.
        living: the model that is trained. Where the job's function returns that instead of a new
            one, it stays as it is, and recording the job is refused.
    """
    # Not the modules themselves: what a job's functions hold belongs to its steps.
    trained = {id(module) for module in living.modules()}

    def model() -> torch.nn.Module:
        made = job.model()
        is_trained = any(id(module) in trained for module in made.modules())
        return made if is_trained else make_whole(made)

    return replace(job, model=model)


@torch.no_grad()
def make_whole(model: torch.nn.Module) -> torch.nn.Module:
    """Undo ``fully_shard`` in place: parameters of the whole shape, without their values.

    Read from torch 2.13 (torch/distributed/fsdp/_fully_shard). One that is whole stays as it is.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return model
    for module in [*model.modules()]:
        if not isinstance(module, kind):
            continue
        sharded: Any = module
        state = sharded._get_fsdp_state()
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        for group in state._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter._setattr_on_modules(_whole_parameter(parameter))
        sharded.__class__ = type(sharded).__mro__[2]  # FSDPLinear has FSDPModule, then Linear
    return model


def _whole_parameter(parameter: Any) -> torch.nn.Parameter:
    shard: torch.Tensor = parameter.sharded_param
    values = torch.zeros(parameter._orig_size, dtype=shard.dtype, device=shard.device)
    return torch.nn.Parameter(values, requires_grad=shard.requires_grad)
