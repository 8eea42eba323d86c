"""Jobs whose batches are nested tensors, with rows of many lengths, or masked ones."""

from __future__ import annotations

import torch
from tests.zoo.small_jobs import sgd
from torch import nn

from memfit import Job

WIDTH = 64


def lengths_of(size: int) -> list[int]:
    """Return lengths from 10 to 59, which have no pattern."""
    return [(37 * number) % 50 + 10 for number in range(size)]


def rows_of(size: int) -> torch.Tensor:
    """Return a nested tensor, made of a list of its rows."""
    rows = [torch.randn(length, WIDTH) for length in lengths_of(size)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def rows_from_offsets(size: int) -> torch.Tensor:
    """Return a nested tensor, made of all values and where rows begin."""
    lengths = torch.tensor(lengths_of(size))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(torch.randn(int(offsets[-1]), WIDTH), offsets)


def masked(size: int) -> torch.Tensor:
    """Return a masked tensor."""
    values = torch.randn(size, WIDTH)
    return torch.masked.masked_tensor(values, torch.ones(size, WIDTH, dtype=torch.bool))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def mean_of_values(model, rows) -> torch.Tensor:
    return model(rows).values().square().mean()


def ragged_job(batch=rows_of, model=mlp, batch_size: int = 64, loss=mean_of_values) -> Job:
    """Return a job that trains on rows of many lengths."""
    return Job(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=sgd,
        batch_size=batch_size,
    )


def masked_job(batch_size: int = 64) -> Job:
    """Return a job that trains on what a mask leaves."""
    return Job(
        model=mlp,
        batch=masked,
        loss=lambda model, values: model(values.get_data()).square().mean(),
        optimizer=sgd,
        batch_size=batch_size,
    )
