"""Jobs with operators that nobody can see into: some keep samples apart, some mix them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from memfit import Job

Operator = Callable[[torch.Tensor], torch.Tensor]


def _wants_powers_of_two(x: torch.Tensor) -> None:
    """Refuse other numbers of rows, as kernels that were written for one shape do.

    So nobody finds out what such an operator does by calling it with a few numbers of rows.
    """
    if len(x) & (len(x) - 1):
        raise ValueError(f"{len(x)} rows: not a power of two")


@torch.library.custom_op("memfit_tests::kept_apart", mutates_args=())
def kept_apart(x: torch.Tensor) -> torch.Tensor:
    _wants_powers_of_two(x)
    return x - x.mean(1, keepdim=True)


@torch.library.custom_op("memfit_tests::mixed", mutates_args=())
def mixed(x: torch.Tensor) -> torch.Tensor:
    _wants_powers_of_two(x)
    return x - x.mean(0, keepdim=True)


@torch.library.custom_op("memfit_tests::hardly_mixed", mutates_args=())
def hardly_mixed(x: torch.Tensor) -> torch.Tensor:
    _wants_powers_of_two(x)
    return x - 1e-3 * x.mean(0, keepdim=True)


def _backward(operator: Any) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    return lambda _, gradient: operator(gradient)


for _operator in (kept_apart, mixed, hardly_mixed):
    _operator.register_fake(torch.empty_like)
    _operator.register_autograd(_backward(_operator))


def opaque_job(operator: Operator, *, batch_size: int = 8, width: int = 16) -> Job:
    """Return a job whose hidden layer passes through an operator."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return (model[1](operator(model[0](inputs)).tanh()) - targets).square().mean()

    return Job(
        model=lambda: nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)),
        batch=lambda size: (torch.randn(size, width), torch.randn(size, width)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=batch_size,
    )


def labelled_job(*, ignored: int, batch_size: int = 8) -> Job:
    """Return a job whose loss is a mean over labels, some of them left out."""

    def batch(size: int) -> dict[str, torch.Tensor]:
        labels = torch.randint(0, 5, (size, 4))
        labels[:ignored, 0] = -100
        return {"inputs": torch.randn(size, 4, 16), "labels": labels}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten())

    return Job(
        model=lambda: nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 5)),
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=batch_size,
    )
