"""What holds for every test, and small jobs that many share."""

from __future__ import annotations

import gc
import math
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

from memfit import Job
from memfit.runtime.guard import step_log

# Constants that `memfit calibrate` has stored on this machine must not change what tests see.
os.environ["MEMFIT_CONFIG_DIR"] = str(Path(tempfile.gettempdir()) / "memfit-tests-uncalibrated")

# A job in the background ignores SIGINT, and so would every child that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes drawing slow; that says nothing about what is tested.
settings.register_profile("memfit", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("memfit")

# What only `make test-all` runs, a test per line; `list_slow_tests.py` writes it.
_SLOW = frozenset((Path(__file__).parent / "slow_tests.txt").read_text("utf-8").splitlines())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Call slow what only ``make test-all`` runs."""
    for item in items:
        if item.nodeid.removeprefix("tests/") in _SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture
def regression_job() -> Job:
    """Return a small regression with ten samples to a batch."""

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
