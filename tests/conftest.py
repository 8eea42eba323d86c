"""What holds for every test, and what many share."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import nn

from memfit import Job
from memfit.cli.main import main
from memfit.observe.allocator_blocks import living_blocks
from memfit.planner.search import aside
from memfit.runtime.guard import step_log

# Constants that `memfit calibrate` has stored on this machine must not change what tests see.
os.environ["MEMFIT_CONFIG_DIR"] = str(Path(tempfile.gettempdir()) / "memfit-tests-uncalibrated")

# Nor what was recorded before.
os.environ["MEMFIT_CACHE_DIR"] = ""

# A job in the background ignores SIGINT, and so would every child that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes drawing slow; that says nothing about what is tested.
settings.register_profile("memfit", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("memfit")


@pytest.fixture(autouse=True, scope="session")
def _one_process() -> Iterator[None]:
    """Have commands plan in one process: tests run side by side already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aside, "usable_processes", lambda: 1)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without looking for cycles in what is imported: a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture
def others_bytes() -> Iterator[int]:
    """Return what tests before this one have left, none of which ends while this one runs."""
    gc.collect()
    gc.disable()
    try:
        yield sum(living_blocks().values())
    finally:
        gc.enable()


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


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs a command in this process and reads its JSON."""

    def run(*words: str, exit_code: int = 0) -> Any:
        assert main([*words, "--json"]) == exit_code
        shown = capsys.readouterr()
        assert shown.err == ""
        return json.loads(shown.out)

    return run


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command that must fail, and gives its one line."""

    def run(*words: str, exit_code: int = 1) -> str:
        assert main(words) == exit_code
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith("memfit: error: ")
        return line

    return run


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # it would format the stack three times, for devices that are not there
        torch.default_generator.manual_seed(0)


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
