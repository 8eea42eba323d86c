"""The table of cases, and the parts that most of them are built from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memfit import Job

CASES: dict[str, Callable[[], Job]] = {}
"""Every case by its name: a function that builds its job anew."""

WIDTH = 64
BATCH_SIZE = 256


def case(build: Callable[[], Job]) -> Callable[[], Job]:
    """Enter a function that builds a job into the table."""
    CASES[build.__name__] = build
    return build


def rows(size: int) -> tuple[Tensor, Tensor]:
    """Draw inputs (B, W) and targets (B, 1)."""
    return torch.randn(size, WIDTH), torch.randn(size, 1)


def images(size: int) -> tuple[Tensor, Tensor]:
    """Draw pictures (B, 3, 12, 12) and targets (B, 1)."""
    return torch.randn(size, 3, 12, 12), torch.randn(size, 1)


def layers(*inner: nn.Module, depth: int = 4) -> nn.Sequential:
    """Stack ``depth`` linear layers with GELU between them, other modules in their middle."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*blocks[: depth // 2], *inner, *blocks[depth // 2 :], nn.Linear(WIDTH, 1))


def squared_error(model: Callable[[Any], Tensor], batch: tuple[Any, Tensor]) -> Tensor:
    """Average the squared error over the batch."""
    return (model(batch[0]) - batch[1]).square().mean()


def make_job(
    model: Callable[[], nn.Module],
    batch: Callable[[int], Any] = rows,
    loss: Callable[..., Any] = squared_error,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> Job:
    """Make a job of a model, with the usual rest."""
    return Job(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05)),
        batch_size=BATCH_SIZE,
    )
