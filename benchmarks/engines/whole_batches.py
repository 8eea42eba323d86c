"""Plain PyTorch on whole batches, which every engine is held against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np  # whose largest value of some that are not numbers is none
import torch

from memfit import Job, Total
from memfit.job import build_optimizer

_NUM_STEPS = 5


def batches(job: Job) -> Iterator[Any]:
    """Yield the whole batches of the steps: the first is full, others lack a sample or two."""
    for number in range(_NUM_STEPS):
        torch.manual_seed(number)
        yield job.batch(job.batch_size - number % 3)


def built(job: Job) -> torch.nn.Module:
    """Build the model with the same values everywhere."""
    torch.manual_seed(0)
    return job.model()


class Differences:
    """Train on whole batches as plain PyTorch does, and hold others against that."""

    def __init__(self, job: Job) -> None:
        model = built(job)
        optimizer = build_optimizer(job, model.named_parameters())
        self._losses: list[float] = []
        for batch in batches(job):
            optimizer.zero_grad()
            found = job.loss(model, batch)
            loss = found.sum / found.count if isinstance(found, Total) else found
            loss.backward()
            if job.clip_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
            optimizer.step()
            self._losses.append(float(loss.detach()))
        self._weights = {name: each.detach().clone() for name, each in model.named_parameters()}

    def of_losses(self, losses: Sequence[float]) -> float:
        """Return the largest relative difference of any step's loss."""
        pairs = zip(losses, self._losses, strict=True)
        return float(np.max([abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]))

    def of_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Return the largest difference of any weight, put together from all ranks."""
        worst = 0.0
        for name, each in weights:
            full: Callable[[], torch.Tensor] = getattr(each, "full_tensor", each.detach)
            difference = float((full().detach() - self._weights[name]).abs().max())
            worst = float(np.maximum(worst, difference))
        return worst
