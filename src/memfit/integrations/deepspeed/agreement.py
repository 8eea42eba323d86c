"""What ranks agree on before the first pass of a step, so that none waits for ever."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from memfit.errors import BatchConditionError, OtherRankError, StrategyError


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedStep:
    """How every rank carries out a step."""

    num_passes: int
    num_samples: int
    """Of all ranks."""


def agree(num_samples: int, num_passes: int, broken: str, device: torch.device) -> AgreedStep:
    """Return how many passes all ranks make, the most that one of them needs.

    In stage 2 and 3 ranks exchange something in every pass, so that all need equally many.

    Args:
        num_samples: of this rank.
        num_passes: that this rank needs.
        broken: why this rank cannot weigh its batch; empty where it can.
        device: which ranks can send from.

    Raises:
        StrategyError: on all ranks, if one has fewer samples than passes are needed.
        BatchConditionError: on a rank whose batch cannot be weighed.
        OtherRankError: on the others then.
    """
    most = torch.tensor([num_passes, -num_samples, int(bool(broken))], device=device)
    total = torch.tensor([num_samples], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    needed, least = int(most[0]), -int(most[1])
    if broken:
        raise BatchConditionError("DeepSpeed's ranks and passes", broken)
    if most[2]:
        raise OtherRankError("its batch cannot be cut exactly")
    if least < needed:
        reason = (
            f"a rank needs {needed} passes, and another has {least} sample(s). Give every rank at "
            f"least {needed} samples, or take a larger micro_batch_size."
        )
        raise StrategyError("DeepSpeed", reason)
    return AgreedStep(num_passes=needed, num_samples=int(total))
