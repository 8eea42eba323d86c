"""The entry of cached gradients, with losses that couple samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.small_jobs import regression_job
from torch import nn

from memfit import Job
from memfit.strategies.cached_gradients import CachedGradients

from .builders import (
    Entry,
    Residual,
    batch_normalised,
    residual,
    samples_in_second_dimension,
    sgd,
)


class TwoTowers(nn.Module):
    """Two encoders and a temperature."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.queries, self.documents = (
            nn.Sequential(*(Residual(width) for _ in range(num_blocks)), nn.Linear(width, 8))
            for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, queries, documents):
        queries, documents = self.queries(queries), self.documents(documents)
        return (
            self.log_scale.exp() * F.normalize(queries, dim=-1) @ F.normalize(documents, dim=-1).T
        )


def in_batch_negatives(width: int = 8, num_blocks: int = 2, batch_size: int = 10) -> Job:
    """Score every query against every document of the batch; the model gives the scores."""

    def loss(model, batch):
        scores = model(*batch)
        return F.cross_entropy(scores, torch.arange(len(scores)))

    towers = lambda: TwoTowers(width, num_blocks)  # noqa: E731
    return regression_job(towers, (width,), loss=loss, batch_size=batch_size)


def contrast_by_label(z, labels):
    """Draw samples of a label together, and push all others apart."""
    scores = z @ z.T / 0.3
    itself = torch.eye(len(z), dtype=torch.bool)
    logs = scores - scores.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positives = (labels[:, None] == labels) & ~itself
    return -((logs * positives).sum(1) / positives.sum(1).clamp(min=1)).mean()


def supervised_contrastive(width: int = 8, num_blocks: int = 2, batch_size: int = 10) -> Job:
    """Contrast two views, given to the encoder at once, of samples with labels."""

    def loss(model, batch):
        first, second, labels = batch
        z = F.normalize(model(torch.cat([first, second])), dim=-1)
        return contrast_by_label(z, labels.repeat(2))

    def batch(size):
        return torch.randn(size, width), torch.randn(size, width), torch.randint(0, 3, (size,))

    return Job(
        model=lambda: nn.Sequential(*(Residual(width) for _ in range(num_blocks))),
        batch=batch,
        loss=loss,
        optimizer=sgd,
        batch_size=batch_size,
    )


def large_supervised_contrastive() -> Job:
    return supervised_contrastive(width=64, num_blocks=4, batch_size=384)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=CachedGradients,
        settings=tuple(CachedGradients(micro_batch_size=size) for size in (1, 3, 5)),
        jobs=(in_batch_negatives, supervised_contrastive, residual, samples_in_second_dimension),
        large_job=large_supervised_contrastive,
        large_settings=tuple(CachedGradients(micro_batch_size=size) for size in (96, 50)),
        refusal=(
            CachedGradients(micro_batch_size=2, representations=("",)),
            batch_normalised,
            "batch normalisation takes its statistics over the whole batch",
        ),
    ),
)
