"""What ranks agree on where a model exchanges shards in forward and backward, as FSDP2 does.

Every pass of such a model is a pass of all ranks: where one runs a piece more than the others, all
wait for ever. And what a rank has in ``.grad`` is a part of what all have computed, already
averaged, so that it is not its own count that this is divided by.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from memfit.errors import StrategyError


class ShardAgreement:
    """Exchange a few numbers with the ranks of torch's default process group.

    Gradients are taken to be averaged over the ranks while backward runs, as FSDP2 does unless it
    is told otherwise (torch.distributed.fsdp.fully_shard, torch 2.13).

    Args:
        device: of the model, which the group can send from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def num_pieces(self, num_pieces: int, num_samples: int) -> int:
        """Return how many pieces all ranks cut their batches into: the most that one needs.

        Raises:
            StrategyError: on all ranks, if one of them has fewer samples than that.
        """
        numbers = torch.tensor([num_pieces, -num_samples], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        if isinstance(numbers, FakeTensor):  # the others are not there
            return num_pieces
        most, least = int(numbers[0]), -int(numbers[1])
        if least < most:
            reason = (
                f"the model exchanges shards in every pass, a rank needs {most} passes, and "
                f"another has {least} sample(s). Give every rank at least {most} samples, or take "
                "larger pieces."
            )
            raise StrategyError("micro-batching", reason)
        return most

    def any_of(self, is_so: bool) -> bool:
        """Return whether something is so on any rank."""
        number = torch.tensor([int(is_so)], device=self._device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return bool(number)

    def sample_weight(self, num_samples: int) -> torch.Tensor:
        """Return what a rank's mean counts for, 1 where all ranks have equally many samples."""
        return num_samples / self.divisor(num_samples)

    def divisor(self, count: torch.Tensor | float) -> torch.Tensor:
        """Return what a rank's sum is divided by: all counts, shared evenly by the ranks."""
        dtype = torch.float32 if self._device.type == "mps" else torch.float64
        total = torch.as_tensor(count).detach().to(self._device, dtype, copy=True)
        dist.all_reduce(total)
        return total / dist.get_world_size()


def agreement_of(model: torch.nn.Module) -> ShardAgreement | None:
    """Return what ranks have to agree on; None for a model that is whole on each of them.

    Raises:
        StrategyError: if the model is in ``FullyShardedDataParallel``.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() < 2:
        return None
    fsdp, tensor = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
    if fsdp is not None and any(
        isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()
    ):
        reason = (
            "the model is in FullyShardedDataParallel, whose shards no other code can clip or "
            "count. Take torch.distributed.fsdp.fully_shard in its place."
        )
        raise StrategyError("sharded model", reason)
    if tensor is None:  # importing it takes seconds, and without it there are no such tensors
        return None
    shards = [each for each in model.parameters() if isinstance(each, tensor.DTensor)]
    return ShardAgreement(shards[0].to_local().device) if shards else None
