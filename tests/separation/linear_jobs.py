"""Jobs over rows with targets, which train a linear layer, and what is found of their pieces."""

from __future__ import annotations

import torch
from tests.conformance import builders
from torch import nn

from memfit import Job
from memfit.analysis.separability import Separability
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout


def rows(size):
    return torch.randn(size, 6), torch.randn(size, 6)


def job_with(loss, batch=rows, model=lambda: nn.Linear(6, 6), batch_size=8) -> Job:
    return Job(model=model, batch=batch, loss=loss, optimizer=builders.sgd, batch_size=batch_size)


def separation_of(job: Job) -> Separation:
    return Separation(job, find_layout(job))


def found_in(job: Job) -> Separability:
    """Return what is known of halves of a batch."""
    return separation_of(job).of(job.batch_size // 2)
