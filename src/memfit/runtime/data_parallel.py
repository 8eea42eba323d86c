"""Averages gradients over ranks once every rank has its own, instead of during backward.

``DistributedDataParallel`` reduces while backward runs, so that a rank that runs out of memory
leaves the others waiting. Here nobody begins before all are ready, and nothing is allocated.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memfit.session.session import Session


class GradientAverage:
    """Average gradients, and the buffers' first rank over all, in place.

    Gradients are reduced one by one, without overlap with backward. A ``Total`` is weighted by its
    count, so that ranks with fewer tokens count less.
    """

    def __init__(self, session: Session, *, broadcasts_buffers: bool) -> None:
        self._session = session
        self._broadcasts_buffers = broadcasts_buffers

    @torch.no_grad()
    def __call__(self) -> None:
        """Average over the ranks of the default group."""
        parameters = self._session.model.parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            return
        share = self._share(gradients[0])
        works = []
        for gradient in gradients:
            gradient.mul_(share)
            works.append(dist.all_reduce(gradient, async_op=True))
        if self._broadcasts_buffers:
            buffers = self._session.model.buffers()
            works += [dist.broadcast(buffer, 0, async_op=True) for buffer in buffers]
        for work in works:
            work.wait()

    def _share(self, like: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of what is averaged over."""
        count = self._session.num_counted
        own = torch.as_tensor(1.0 if count is None else count, device=like.device)
        own = own.to(torch.float64 if like.device.type == "cpu" else torch.float32)
        total = own.clone()
        dist.all_reduce(total)
        return own / total


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Take a model out of ``DistributedDataParallel``, whose part the average plays."""
    return model.module if isinstance(model, DistributedDataParallel) else model
