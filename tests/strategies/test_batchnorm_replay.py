"""Batch-norm replay in steps so small that the random state is what takes most."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import memfit
from memfit.prediction.recording import record
from memfit.strategies import BatchNormReplay

PLAN = memfit.Plan(strategies=(BatchNormReplay(micro_batch_size=8),))


def job_of(
    layers: Callable[[], list[nn.Module]],
    shape: tuple[int, ...] = (6,),
    *,
    batch_size: int = 32,
    dtype: torch.dtype = torch.float32,
) -> memfit.Job:
    """Make a job of layers, which squares what they make of samples of a shape."""
    return memfit.Job(
        model=lambda: nn.Sequential(*layers()).to(dtype),
        batch=lambda size: torch.randn(size, *shape, dtype=dtype),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        batch_size=batch_size,
    )


def around_norm(width: int, *more: nn.Module, **options: object) -> list[nn.Module]:
    """Make two layers with a normalisation between them, and more of them."""
    return [nn.Linear(6, width), nn.BatchNorm1d(width, **options), nn.Linear(width, 3), *more]


def images() -> list[nn.Module]:
    """Make a normalisation of images."""
    return [nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 16, 2)]


def rows() -> list[nn.Module]:
    """Make a normalisation of rows."""
    return [nn.BatchNorm1d(4), nn.Linear(12, 12), nn.LayerNorm(12)]


def convolutions() -> list[nn.Module]:
    """Make three convolutions with normalisations between them."""
    return [
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 2, 1),
    ]


JOBS = {
    "narrow": job_of(lambda: around_norm(2)),
    "plain normalisation": job_of(
        lambda: around_norm(12, affine=False, track_running_stats=False), dtype=torch.float64
    ),
    "uneven": job_of(lambda: around_norm(12, momentum=None), batch_size=27),
    "images": job_of(images, (3, 4, 4)),
    "many pieces of rows": job_of(rows, (4, 12), batch_size=101),
    "draws": job_of(lambda: around_norm(8, nn.BatchNorm1d(3), nn.Dropout(0.5))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_the_peak_of_a_tiny_step_is_the_one_that_is_measured(name):
    measured = memfit.measure(JOBS[name], PLAN)

    assert measured.predicted_peak_bytes == measured.peak_allocated_bytes


@pytest.mark.slow
def test_every_pass_over_a_network_of_convolutions_is_recorded():
    recording = record(job_of(convolutions, (2, 6, 6)), PLAN)

    first, steady = (
        sum(operation.name == "convolution" for operation in trace.operations)
        for trace in (recording.first, recording.steady)
    )

    to_the_norms, whole = 1 + 2, 3
    assert steady == 4 * (to_the_norms + whole + to_the_norms)
    assert first == steady + whole, "one forward more, to find out how often it normalises"


@pytest.mark.parametrize("draws", [False, True])
def test_the_random_state_moves_on_after_a_step_that_has_drawn(draws):
    job = job_of(lambda: around_norm(4, *[nn.Dropout(0.5)] * draws))
    with memfit.start(job, PLAN) as run:
        batch = torch.randn(32, 6)
        before = torch.get_rng_state()
        run.step(batch)

    assert torch.equal(torch.get_rng_state(), before) is not draws
