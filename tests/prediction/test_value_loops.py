"""Loops and exits that the value of a tensor decides: the interval reaches from end to end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit

WIDTH, ROWS, MOST_ROUNDS = 16, 64, 12


def ends_by_a_norm(model, batch):
    y = model(batch)
    for _ in range(MOST_ROUNDS):
        if y.norm() < 4.0:
            break
        y = 0.5 * torch.tanh(y)
    return y.square().mean()


def ends_by_a_number(model, batch):
    y, rest, rounds = model(batch), 1.0, 0
    while rest > 0.2 and rounds < MOST_ROUNDS:
        y = torch.tanh(y) * 0.7
        rest, rounds = y.detach().abs().mean().item(), rounds + 1
    return y.square().mean()


def ends_by_the_loss(model, batch):
    y = batch
    for _ in range(MOST_ROUNDS):
        y = y + torch.tanh(model(y))
        loss = y.square().mean()
        if loss.item() > 1.5:
            break
    return loss


def halts_within_a_tolerance(model, batch):
    y, error = batch, batch.new_ones(()) * 2
    while error > 0.3:
        before, y = y, torch.tanh(0.5 * model(y))
        error = (y - before).abs().mean()
        if not torch.isfinite(error):
            break
    return y.square().mean()


def only_logs(model, batch):
    loss = model(batch).square().mean()
    assert isinstance(loss.item(), float)
    return loss


def job_of(loss):
    return memfit.Job(
        model=lambda: nn.Linear(WIDTH, WIDTH),
        batch=lambda size: torch.randn(size, WIDTH),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=ROWS,
    )


@pytest.mark.slow
@pytest.mark.parametrize("loss", [ends_by_a_norm, ends_by_a_number, ends_by_the_loss])
def test_the_interval_holds_what_is_measured_and_the_line_is_named(loss):
    found = memfit.predict(job_of(loss))
    interval = found.intervals["allocated"]
    measured = memfit.measure(job_of(loss)).peak_allocated_bytes
    assert interval.low_bytes <= measured <= interval.high_bytes
    assert interval.high_bytes - interval.low_bytes > ROWS * WIDTH * 4 * (MOST_ROUNDS - 2)
    assert found.certainty == "guess"
    (answer,) = found.answers
    first = loss.__code__.co_firstlineno
    line = int(answer.source_line.rpartition(":")[2])
    assert first < line < first + 8
    assert answer.decides_sizes


@pytest.mark.slow
def test_a_loop_without_a_bound_ends():
    found = memfit.predict(job_of(halts_within_a_tolerance))
    interval = found.intervals["allocated"]
    measured = memfit.measure(job_of(halts_within_a_tolerance)).peak_allocated_bytes
    assert interval.low_bytes <= measured <= interval.high_bytes
    assert found.certainty == "guess"


def test_a_number_that_is_only_logged_widens_nothing():
    found = memfit.predict(job_of(only_logs))
    assert found.intervals == {}
    assert [each.decides_sizes for each in found.answers] == [False]


@pytest.mark.slow
def test_a_card_has_the_same_ends():
    found = memfit.predict(job_of(ends_by_a_norm), device="t4")
    interval = found.intervals["allocated"]
    assert interval.high_bytes - interval.low_bytes > ROWS * WIDTH * 4 * (MOST_ROUNDS - 2)


@pytest.mark.slow
def test_a_plan_is_made_for_the_larger_end():
    plain = memfit.predict(job_of(ends_by_a_norm))
    high_bytes = plain.intervals["allocated"].high_bytes
    plan = memfit.plan(job_of(ends_by_a_norm), budget=f"{high_bytes}B")
    assert plan.prediction.intervals["allocated"].high_bytes <= high_bytes
    assert plan.prediction.fits
