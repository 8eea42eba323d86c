"""Small jobs that several unit tests share."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memfit import Job
from memfit.runtime.guard import step_log


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


@pytest.fixture
def small_heap() -> Iterator[None]:
    """Keep what other tests have left out of collections, which the guard begins at each failure."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def unhurried_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine be no reason to have nothing to go back to."""
    monkeypatch.setattr(step_log, "_FREE_SECONDS", math.inf)
