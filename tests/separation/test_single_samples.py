"""Pieces of one sample: torch computes some of them otherwise, and most of that is the same."""

from __future__ import annotations

import pytest
import torch
from tests.separation.linear_jobs import job_with, separation_of
from torch import nn


def one_output(model, batch):
    return (model(batch[0]).squeeze(1) - batch[1][:, 0]).square().mean()


def two_heads(model, batch):
    first, second = (head(batch[0]).squeeze(1) for head in model)
    return (torch.minimum(first, second).sigmoid() - batch[1][:, 0]).square().mean()


def column_as_row(model, batch):
    column = model(batch[0])
    return (column.t() * batch[1][:, :1].t()).square().mean()


def heads():
    return nn.ModuleList(nn.Linear(6, 1) for _ in range(2))


def narrow():
    return nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "model"),
    [(one_output, narrow), (two_heads, heads), (column_as_row, narrow)],
    ids=["one output", "two heads", "a column as a row"],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_column_of_one_sample_that_is_its_own_transpose_is_followed(loss, model, size):
    assert separation_of(job_with(loss, model=model)).of(size).is_settled


def louder_alone(model, batch):
    column = model(batch[0])
    factor = 2.0 if len(column) == 1 else 1.0
    return (factor * column).square().mean()


def doubled_alone(model, batch):
    column = model(batch[0])
    other = column if len(column) > 1 else column + column.t()
    return other.square().mean()


def last_alone(model, batch):
    column = model(batch[0])
    return (column if len(column) == 1 else column[-1:]).square().mean()


def products_of_pairs(model, batch):
    column = model(batch[0])
    return (column @ column.t()).mean()


def other_target_alone(model, batch):
    column, target = model(batch[0]), batch[1][:, :1]
    if len(column) == 1:
        return (column - column.t() + target).square().mean()
    return (column - target).square().mean()


@pytest.mark.parametrize(
    "loss", [louder_alone, doubled_alone, last_alone, products_of_pairs, other_target_alone]
)
def test_what_a_single_sample_gets_otherwise_is_never_proved(loss):
    assert not separation_of(job_with(loss, model=narrow)).of(1).is_settled
