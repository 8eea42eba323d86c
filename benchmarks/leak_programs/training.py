"""What the programs share: a small model, its steps, and passes of steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from memfit.observe.leaks import LeakFinder

WIDTH = 64
ROWS = 256
"""An output of the model is 64 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program, and what has to be found in it."""

    run: Callable[[LeakFinder], None]
    kind: str = ""
    """Empty for a clean program."""
    holder: str = ""
    line: str = ""
    """Text of the line that makes what grows; empty where no line can be told."""

    @property
    def name(self) -> str:
        """Return its docstring."""
        return (self.run.__doc__ or "").strip().rstrip(".")


def planted(kind: str, holder: str, line: str = "") -> Callable[[Any], Program]:
    """Make a program of a function, given what leaks in it."""
    return lambda run: Program(run=run, kind=kind, holder=holder, line=line)


def programs_in(*modules: ModuleType) -> tuple[Program, ...]:
    """List the programs of modules; a function that takes a finder alone is a clean one."""
    return tuple(
        each if isinstance(each, Program) else Program(run=each)
        for module in modules
        for each in vars(module).values()
        if isinstance(each, Program)
        or (
            inspect.isfunction(each)
            and each.__module__ == module.__name__
            and [*inspect.signature(each).parameters] == ["finder"]
        )
    )


def small_model() -> nn.Module:
    """Return a model of three layers."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return its optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 64) -> torch.Tensor:
    """Run a step and give its loss, with what is left of its graph."""
    loss = model(torch.randn(rows, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(
    finder: LeakFinder,
    num_steps: int,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Iterator[int]:
    """Run steps and yield their numbers; tell the finder of each, and of the end."""
    model = small_model() if model is None else model
    optimizer = optimizer_of(model) if optimizer is None else optimizer
    for step in range(num_steps):
        train_step(model, optimizer)
        yield step
        finder.boundary("train", step)
    finder.finish()


def train(
    finder: LeakFinder, steps: range, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Run steps and tell the finder."""
    for step in steps:
        train_step(model, optimizer)
        finder.boundary("train", step)


def text_of_line(source_line: str) -> str:
    """Read a line of these programs, given as ``file.py:12``."""
    name, _, number = source_line.partition(":")
    file = Path(__file__).parent / name
    return file.read_text("utf-8").splitlines()[int(number) - 1] if file.is_file() else ""
