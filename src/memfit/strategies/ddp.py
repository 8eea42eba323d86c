"""DDP: every rank has the whole model, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from memfit.strategies.data_parallel import AbstractDataParallel, give_all_the_same


@dataclass(frozen=True, kw_only=True)
class Ddp(AbstractDataParallel):
    """Have every rank train the whole model on its share of the batch, and average the gradients.

    The ranks begin with the parameters of rank 0. Gradients are averaged in place once every rank
    has its own, so once for all micro-batches, and no buckets are held besides: torch's own
    ``DistributedDataParallel`` takes as much again as the gradients, and averages beside backward.
    A mean is weighted by the samples of each rank, a ``Total`` by its count.

    Limits: nothing is computed while gradients are averaged. Ranks draw other random numbers than
    one process would, as far as the job seeds them so.
    Source: Li et al. 2020, https://arxiv.org/abs/2006.15704, sections 3.1 and 3.2.1.
    """

    name: ClassVar[str] = "ddp"
    averages_after_backward: ClassVar[bool] = True
    not_with_shards: ClassVar[str] = "it gives every rank the whole model"
    excludes: ClassVar[Mapping[str, str]] = {
        "optimizer-in-backward": "gradients are averaged over ranks before the update, and it "
        "leaves none"
    }

    @classmethod
    def choices(cls, num_ranks: int, device_type: str) -> Iterator[Self]:
        """Yield its only setting."""
        del num_ranks, device_type
        yield cls()

    def share(self, model: torch.nn.Module, device_type: str) -> None:
        """Begin with the same parameters on every rank."""
        give_all_the_same(model, device_type)
        model.to(device_type)
