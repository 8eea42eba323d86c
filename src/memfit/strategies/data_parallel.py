"""Data parallelism: how the ranks of a process group share a model and the effective batch."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.distributed as dist

from memfit.errors import StrategyError, UsageError
from memfit.job import Job
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts
from memfit.trace.events import Category


@dataclass(frozen=True, kw_only=True)
class AbstractDataParallel(Strategy):
    """Train on the ranks of torch's default process group, each with its share of every batch.

    It takes hold of a model before the optimizer is made, and stays until the process ends: closing
    a run leaves the model as the ranks have shared it.
    """

    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL, Seam.OPTIMIZER, Seam.WINDOW})
    acts_on: ClassVar[Mapping[Category, float]] = {}  # it is no matter of one rank's step
    averages_after_backward: ClassVar[bool] = False
    """Whether ranks average whole gradients once all have theirs; else backward does so."""

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer nothing: it is chosen with the number of ranks, before all else."""
        del facts
        yield from ()

    @classmethod
    @abc.abstractmethod
    def choices(cls, num_ranks: int, device_type: str) -> Iterator[Self]:
        """Yield the settings that a planner may try among so many ranks."""

    def refuses(self, strategy: type[Strategy]) -> str | None:
        """Say in a sentence why another strategy is not to be tried with it; None if it may."""
        del strategy
        return None

    @abc.abstractmethod
    def share(self, model: torch.nn.Module, device_type: str) -> None:
        """Share a whole model among the ranks, and bring it to their devices."""

    def apply(self, session: Session) -> Undo:
        """Check that the session's model was shared when it was built.

        Raises:
            StrategyError: if it was not.
        """
        if session.parallel != self:
            reason = (
                "ranks share a model before its optimizer is made, so nothing that is built "
                "already can have it. Take it with memfit.start and a plan for several ranks."
            )
            raise StrategyError(self.name, reason)
        return _nothing


def _nothing() -> None:
    """Undo nothing: ranks go on sharing the model."""


def share_of(job: Job, num_ranks: int, rank: int) -> Job:
    """Return the job of one rank: with its part of the effective batch, the larger ones first.

    Raises:
        UsageError: if there are more ranks than samples.
    """
    if num_ranks > job.batch_size:
        raise UsageError(
            f"An effective batch of {job.batch_size} sample(s) cannot be shared by {num_ranks} "
            f"ranks. Take {job.batch_size} at most."
        )
    least, rest = divmod(job.batch_size, num_ranks)
    return replace(job, batch_size=least + (rank < rest))


@torch.no_grad()
def give_all_the_same(model: torch.nn.Module, device_type: str) -> None:
    """Give every rank the parameters and buffers that rank 0 has made.

    Tensors without content (on ``meta``) are left alone.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            continue
        sent = tensor.detach().to(device_type)
        dist.broadcast(sent, 0)
        if sent.device != tensor.device:
            tensor.copy_(sent)
