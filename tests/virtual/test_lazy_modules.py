"""Lazy modules: refused with what to do, which is then predicted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import JobFunctionError


def job_of(model):
    return memfit.Job(
        model=model,
        batch=lambda size: torch.randn(size, 8),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.LazyConv1d(4, 3)
        self.norm = nn.LazyInstanceNorm1d(affine=True)
        self.head = nn.LazyLinear(16, dtype=torch.float64)

    def forward(self, inputs):
        features = self.norm(self.convolution(inputs.unsqueeze(1)))
        return self.head(features.flatten(1).double())


def plain():
    return nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.LazyLinear(4))


def run_dry(model):
    with torch.no_grad():
        model(torch.randn(2, 8))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("build", [plain, lambda: plain().double().float(), Convolved])
def test_lazy_modules_that_the_model_function_runs_are_predicted(build):
    job = job_of(lambda: run_dry(build()))

    assert memfit.predict(job).peak_allocated_bytes == memfit.measure(job).peak_allocated_bytes


@pytest.mark.parametrize("ask", [memfit.predict, memfit.measure])
def test_one_that_has_not_run_is_refused_with_what_to_do(ask):
    with pytest.raises(JobFunctionError, match=r"0\.weight is of a lazy module.*torch\.no_grad"):
        ask(job_of(plain))


@pytest.mark.slow
def test_one_that_has_run_before_is_predicted():
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d())
    model(torch.randn(4, 8))
    job = job_of(lambda: model)
    found = memfit.predict(job)
    assert found.peak_allocated_bytes == memfit.measure(job).peak_allocated_bytes
