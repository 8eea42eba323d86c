"""Trains workloads as the command line does, for the tests of each of them."""

from __future__ import annotations

import argparse
import itertools
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rich.console import Console

from memfit_workloads import load_workload, loop


def train_workload(
    name: str, words: Sequence[object], console: Console | None = None
) -> dict[str, Any]:
    """Run a workload as the command line does."""
    workload = load_workload(name)
    parser = argparse.ArgumentParser()
    workload.add_arguments(parser)
    args = parser.parse_args([str(word) for word in words])
    return workload.run(args, console or Console(quiet=True))


def press_ctrl_c_in_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the process receive SIGINT while a step of training is run."""
    step: Callable[..., None] = loop._step
    numbers = itertools.count(1)

    def interrupted(system: Any) -> None:
        if next(numbers) == number:
            signal.raise_signal(signal.SIGINT)
        step(system)

    monkeypatch.setattr(loop, "_step", interrupted)
