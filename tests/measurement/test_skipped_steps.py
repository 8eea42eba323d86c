"""A measurement goes on until a gradient scaler skips no more steps."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Plan
from memfit.measurement.measure import SkippedSteps
from memfit.strategies.fp16 import Fp16


def scaled_steps(gradients) -> int:
    """Count the steps to take if these gradients come one after another."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu")
    gradients = iter(gradients)
    count = 0
    with SkippedSteps() as skipped:
        for _ in skipped.until_steady():
            count += 1
            parameter.grad = torch.full((2,), next(gradients))
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return count


def test_two_steps_are_taken_if_none_is_skipped():
    assert scaled_steps([1.0] * 9) == 2


def test_one_more_is_taken_for_each_that_is_skipped():
    assert scaled_steps([torch.inf, torch.nan] + [1.0] * 9) == 4


def test_the_last_is_not_skipped():
    assert scaled_steps([1.0, torch.inf] + [1.0] * 9) == 3


def test_no_more_are_taken_than_find_any_scale():
    assert scaled_steps([torch.inf] * 99) < 50


@pytest.mark.slow
def test_a_step_with_the_states_of_the_optimizer_is_measured_under_fp16():
    def loss(model, batch):
        return model(batch).square().sum() * 50_000

    def model():
        return nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1))

    job = mean_square_job(model, 300, batch_size=8, loss=loss, optimizer=torch.optim.Adam)
    measured = memfit.measure(job, Plan(strategies=(Fp16(),)))
    assert abs(measured.predicted_peak_bytes / measured.peak_allocated_bytes - 1) < 0.1
