"""Small jobs that several unit tests share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit import Job


@pytest.fixture
def regression_job() -> Job:
    """Give a small regression with ten samples to a batch."""

    def loss(model, batch):
        inputs, targets = batch
        return (model(inputs) - targets).square().mean()

    return Job(
        model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        batch=lambda size: (torch.randn(size, 16), torch.randn(size, 4)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=10,
    )


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state."""
    torch.manual_seed(0)
