"""Small jobs whose losses couple the samples of a batch, and plans that cut their representations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.strategies.cached_gradients import CachedGradients

EXACT = 1e-10
WIDTH = 12


class Encoder(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 6)
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        return self.last(self.dropout(self.first(x).tanh()))


def samples(size: int):
    return torch.randn(size, WIDTH)


def two_views(size: int):
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def whitening(z):
    return (z.T @ z / len(z) - torch.eye(z.shape[1])).square().sum()


def whitened(model, batch):
    return whitening(model(batch))


def info_nce(queries, documents):
    return F.cross_entropy(queries @ documents.T / 3, torch.arange(len(queries)))


def contrasted(model, batch):
    return info_nce(model(batch[0]), model(batch[1]))


def job_of(model, loss=whitened, batch=samples, batch_size: int = 14, clip=None) -> Job:
    return Job(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=batch_size,
        clip_grad_norm=clip,
    )


def plan_of(size: int = 4, *representations: str, others=()) -> Plan:
    cut = CachedGradients(micro_batch_size=size, representations=representations)
    return Plan(strategies=(*others, cut))


def assert_exact(job: Job, plan: Plan) -> None:
    found = memfit.verify(job, plan)
    assert found.earned == "exact", (found.worst, found.largest_error)
    assert found.largest_error <= EXACT
