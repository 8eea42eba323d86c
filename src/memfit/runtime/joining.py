"""Joins the ranks that carry out a plan together, and gives each its part of the job."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist

from memfit.devices.spec import CPU
from memfit.errors import MemfitWarning, OtherRankError, StrategyError, UsageError
from memfit.job import Job
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout
from memfit.strategies.data_parallel import share_of
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan

_BACKENDS = {CPU: "gloo"}
_CARD_BACKENDS = "cpu:gloo,cuda:nccl"
"""Clipping shards that lie on the host needs a group that can send from there."""


def join_for(plan: Plan, device_type: str) -> None:
    """Open the process group that a plan for several ranks needs.

    It is opened where torchrun has started this process and nobody has opened it.

    Raises:
        UsageError: if there are not as many ranks as the plan is for.
    """
    if plan.parallel is not None:
        _open_group(device_type)
    num_ranks = _num_ranks()
    is_lonely = plan.parallel is not None and num_ranks == 1
    if is_lonely or num_ranks != (plan.ranks or num_ranks):
        raise UsageError(
            f"The plan is for {plan.ranks or 'several'} rank(s), and here are {num_ranks}. Start "
            f"it with torchrun --nproc-per-node {plan.ranks or 'N'} over all machines, or plan for "
            "the ranks there are."
        )


def part_of_this_rank(job: Job, plan: Plan, device_type: str) -> Job:
    """Return this rank's part of a job whose plan is for several; else the job as it is.

    Raises:
        OtherRankError: if another rank has another plan.
        StrategyError: if the job mixes samples that different ranks have.
    """
    if plan.parallel is None:
        return job
    num_ranks = dist.get_world_size()
    _check_same_plan(plan, device_type)
    part = share_of(job, num_ranks, dist.get_rank())
    _check_separable(job, plan, share_of(job, num_ranks, 0).batch_size)
    return part


def _num_ranks() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _open_group(device_type: str) -> None:
    if dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    if device_type != CPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(_BACKENDS.get(device_type, _CARD_BACKENDS))


def _check_same_plan(plan: Plan, device_type: str) -> None:
    """Have all ranks carry out the same plan.

    Raises:
        OtherRankError: if one has another.
    """
    own = torch.tensor([plan.checksum(), -plan.checksum()], device=device_type)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    if int(own[0]) != -int(own[1]):
        msg = "the ranks have different plans. Plan once, and load it on all"
        raise OtherRankError(msg)


def _check_separable(job: Job, plan: Plan, share: int) -> None:
    """Refuse to share a batch whose samples the step mixes.

    Raises:
        StrategyError: if it does.
    """
    assert plan.parallel is not None, "the plan is for several ranks"
    found = MicroBatching(micro_batch_size=share).separability(Separation(job, find_layout(job)))
    if found.is_refuted:
        reason = f"{found.sentence} Ranks have different samples, so they would train another loss."
        raise StrategyError(plan.parallel.name, reason)
    if not found.is_settled and dist.get_rank() == 0:
        msg = (
            "It could not be proved that ranks which share the batch train what the whole batch "
            f"does: {found.sentence}"
        )
        warnings.warn(msg, MemfitWarning, stacklevel=4)
