"""Takes a job's loss, a mean or a sum over its batch, as a loss for each sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.errors import JobError
from memfit.job import Job, Total

from .gradients import SampleLoss


def losses_of(loss: SampleLoss | Job) -> SampleLoss:
    """Return a per-sample loss; of a job, its own loss of each sample as a batch of one."""
    return _JobLosses(loss) if isinstance(loss, Job) else loss


class _JobLosses:
    """A job's loss on every sample at once, each as if it were alone in its batch."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return losses (B,).

        Raises:
            JobError: if the loss cannot be computed so.
        """
        leaves = [each for each in tree_leaves(batch) if isinstance(each, Tensor)]
        if len({len(each) if each.dim() else 0 for each in leaves}) != 1:
            msg = (
                "The tensors of the job's batch do not have the samples in their first dimensions. "
                "Give a loss for each sample instead: (model, batch) -> losses (B,)."
            )
            raise JobError(msg)

        def alone(sample: Any) -> Tensor:
            value = self._job.loss(model, tree_map_only(Tensor, lambda each: each[None], sample))
            return value.sum if isinstance(value, Total) else value

        try:
            losses: Tensor = torch.func.vmap(alone)(batch)
        except (RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            msg = (
                f"The job's loss cannot be computed for each sample at once ({reason:.200}). Give "
                "a loss for each sample instead: (model, batch) -> losses (B,)."
            )
            raise JobError(msg) from None
        return losses
