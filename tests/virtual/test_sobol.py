"""Sobol engines, whose points are computed past dispatch: in batches, losses and models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memfit

WIDTH, POINTS = 8, 64
LIVING = torch.quasirandom.SobolEngine(WIDTH)


def drawn_in_the_loss(model, batch):
    engine = torch.quasirandom.SobolEngine(WIDTH, scramble=True, seed=1)
    return model(torch.cat([batch, engine.draw(POINTS).to(batch)])).square().mean()


def drawn_from_a_living_one(model, batch):
    LIVING.fast_forward(3)
    return model(torch.cat([batch, LIVING.draw(POINTS).to(batch)])).square().mean()


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.engine = torch.quasirandom.SobolEngine(WIDTH, scramble=True, seed=1)
        self.layer = nn.Linear(WIDTH, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([x, self.engine.draw(POINTS).to(x)]))


def job_of(loss=lambda model, batch: model(batch).square().mean(), **given):
    batch = given.get("batch", lambda size: torch.randn(size, WIDTH))
    return memfit.Job(
        model=given.get("model", lambda: nn.Linear(WIDTH, 32)),
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=128,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        job_of(batch=lambda size: torch.quasirandom.SobolEngine(WIDTH, seed=1).draw(size)),
        job_of(drawn_in_the_loss),
        job_of(drawn_from_a_living_one),
        job_of(model=Drawing),
    ],
    ids=["batch", "loss", "living", "model"],
)
def test_points_are_predicted_to_the_byte(job):
    found = memfit.predict(job)
    assert found.peak_allocated_bytes == memfit.measure(job).peak_allocated_bytes


def test_points_that_go_to_a_card_are_predicted():
    assert memfit.predict(job_of(drawn_in_the_loss), device="t4").peak_allocated_bytes > 0


def test_a_living_engine_goes_on_where_it_stood():
    job, engine = job_of(drawn_from_a_living_one), LIVING
    before, state = engine.num_generated, engine.quasi.clone()
    memfit.predict(job)
    assert engine.num_generated == before
    assert engine.quasi.equal(state)
