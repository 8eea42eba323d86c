"""What the ranks of a run do together: averages of gradients and losses.

Gradients of whole models are averaged once every rank has its own, instead of during backward.

``DistributedDataParallel`` reduces while backward runs, so that a rank that runs out of memory
leaves the others waiting. Here nobody begins before all are ready, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memfit.session.session import Session
from memfit.session.shard_agreement import agreement_of


def join_ranks(session: Session) -> Callable[[], None] | None:
    """Have ranks agree where they share a model; return what averages gradients before the update.

    Raises:
        StrategyError: if the model is in ``FullyShardedDataParallel``.
    """
    session.agreement = agreement_of(session.model)
    session.is_one_of_several = session.agreement is not None or session.parallel is not None
    if session.parallel is None:
        return None
    session.loss_over_ranks = partial(_loss_over_ranks, session)
    if not session.parallel.averages_after_backward:
        return None
    return GradientAverage(session, broadcasts_buffers=True)


@torch.no_grad()
def _loss_over_ranks(session: Session, loss: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over what all ranks have, a Total by its counts."""
    dtype = torch.float64 if loss.device.type == "cpu" else torch.float32
    weight = torch.as_tensor(_weight_of(session), device=loss.device).to(dtype)
    parts = torch.stack([loss.detach().to(dtype) * weight, weight])
    dist.all_reduce(parts)
    return (parts[0] / parts[1]).to(loss.dtype)


def _weight_of(session: Session) -> torch.Tensor | float:
    """Return what a rank counts for: its count, its samples, or as much as every other."""
    if session.num_counted is not None:
        return session.num_counted
    return 1.0 if session.parallel is None else float(session.num_samples)


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
        own = torch.as_tensor(_weight_of(self._session), device=like.device)
        own = own.to(torch.float64 if like.device.type == "cpu" else torch.float32)
        total = own.clone()
        dist.all_reduce(total)
        return own / total


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Take a model out of ``DistributedDataParallel``, whose part the average plays."""
    return model.module if isinstance(model, DistributedDataParallel) else model
