"""What holds for every test, and what many share."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests import seconds
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
NUM_IMPORTED = 100
"""A test that is the first to import so many modules takes longer than it does by itself."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run refuse tests that have become slow."""
    words = "fail what takes more processor time than this and is not called slow"
    parser.addoption("--most-seconds", type=float, default=math.inf, help=words)


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Call slow what only ``make test-all`` runs, and fast what ``make fast`` runs."""
    listed = seconds.listed()
    names = {item: item.nodeid.removeprefix("tests/") for item in items}
    for item, name in names.items():
        is_rule = name.startswith("house/")  # each change is held to these
        if seconds.seconds_of(name, listed) > seconds.SLOW_SECONDS and not is_rule:
            item.add_marker(pytest.mark.slow)
    quick = {
        name: seconds.fixtures_of(item)
        for item, name in names.items()
        if not item.get_closest_marker("slow")
    }
    fast = seconds.fast(quick, listed)
    for item, name in names.items():
        if name in fast:
            item.add_marker(pytest.mark.fast)
    config.stash[seconds.COLLECTED] = frozenset(names.values())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Iterator[None]:
    """Note the processor time of what is made once for several tests, or for each."""
    began = processor_seconds()
    value = yield
    took, name = processor_seconds() - began, seconds.name_of(fixturedef)
    if name and took >= seconds.LISTED_SECONDS:
        properties = request._pyfuncitem.user_properties
        properties.append((seconds.FIXTURE_PROPERTY, f"{took:.2f} {name}"))
    return value


def processor_seconds() -> float:
    """Return the processor time of this process and its children."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Note a test's processor time, which a busy machine does not change; refuse too much of it."""
    num_modules, began = len(sys.modules), processor_seconds()
    yield
    took = processor_seconds() - began
    item.user_properties.append((seconds.PROPERTY, f"{took:.2f}"))
    is_first = len(sys.modules) - num_modules >= NUM_IMPORTED
    # The first test that hypothesis runs in a process reads the constants of all modules.
    is_drawn = hasattr(getattr(item, "obj", None), "hypothesis")
    is_excused = is_first or is_drawn or item.get_closest_marker("slow")
    if not is_excused and took > (most := item.config.getoption("--most-seconds")):
        pytest.fail(
            f"{took:.1f} s of processor time, more than {most:g}: make it quicker, or list it as "
            "slow in tests/seconds.txt",
            pytrace=False,
        )


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
