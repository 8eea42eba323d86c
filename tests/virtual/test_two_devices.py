"""Tensors of the host among those of the card: refused as a real GPU refuses them, by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import JobFunctionError, RecordingError

WIDTH = 8
TEACHER = torch.ones(WIDTH, 1)


class WithPlainTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.offset = torch.arange(float(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.offset


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.ones = torch.ones(x.shape)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.ones


def job_of(loss, model=lambda: nn.Linear(WIDTH, 1)):
    return memfit.Job(
        model=model,
        batch=lambda size: torch.randn(size, WIDTH),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=4,
    )


def weighted(model, batch):
    weights = torch.ones(batch.shape[0], 1)
    return (model(batch) * weights).mean()


REFUSED = {
    "made": (job_of(weighted), "loss", "mul"),
    "closure": (job_of(lambda model, batch: (model(batch) - batch @ TEACHER).mean()), "loss", "mm"),
    "attribute": (job_of(lambda model, batch: model(batch).mean(), WithPlainTensor), "loss", "add"),
    "backward": (job_of(lambda model, batch: Kept.apply(model(batch)).mean()), "backward", "mul"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_lies_on_the_host_is_named_with_its_shape_and_the_remedy(name):
    job, part, operator = REFUSED[name]
    with pytest.raises(JobFunctionError) as caught:
        memfit.predict(job, device="t4")
    told = str(caught.value)
    assert part in told
    assert f"aten.{operator}" in told
    assert " on cuda:0, (" in told
    assert " on cpu" in told
    assert ".to(x.device)" in told
    assert "FakeTensor" not in told


def test_the_line_is_named():
    line = weighted.__code__.co_firstlineno + 2
    with pytest.raises(JobFunctionError, match=rf"test_two_devices.py, line {line}\b"):
        memfit.predict(job_of(weighted), device="t4")


def test_a_step_of_any_kind_is_refused_likewise():
    def setup():
        layer, x = nn.Linear(WIDTH, 1).cuda(), torch.ones(4, WIDTH)
        return lambda: layer(x).sum().backward()

    with pytest.raises(RecordingError, match=r"on cpu.*test_two_devices.py, line"):
        memfit.predict_step(setup, "t4")


def test_single_numbers_and_indices_of_the_host_are_taken():
    def loss(model, batch):
        return (model(batch) * torch.tensor(3.0))[torch.arange(2)].mean()

    assert memfit.predict(job_of(loss), device="t4").peak_allocated_bytes > 0
