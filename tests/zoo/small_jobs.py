"""Small jobs, each made in one call, and what is found of a job on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.conformance import builders
from tests.conformance.builders import squared_error
from tests.zoo.living_jobs import mean_square
from torch import nn

from memfit import Job
from memfit.runtime.run import open_plain_session
from memfit.session.batches import find_layout
from memfit.session.session import Session
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.facts import JobFacts


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)


def mean_square_job(
    model: Callable[[], nn.Module],
    *shape: int,
    batch_size: int = 4,
    loss=mean_square,
    optimizer=sgd,
    dtype: torch.dtype | None = None,
) -> Job:
    """Return a job of random numbers, which trains a model to give nothing but zeros."""
    return Job(
        model=model,
        batch=lambda size: torch.randn(size, *shape, dtype=dtype),
        loss=loss,
        optimizer=optimizer,
        batch_size=batch_size,
    )


def regression_job(
    model: Callable[[], nn.Module],
    inputs: tuple[int, ...],
    targets: tuple[int, ...] | None = None,
    *,
    batch_size: int = 10,
    loss=squared_error,
    optimizer=builders.sgd,
    clip: float | None = None,
) -> Job:
    """Return a job of random inputs and targets of some shapes, which are alike unless given."""
    targets = inputs if targets is None else targets
    return Job(
        model=model,
        batch=lambda size: (torch.randn(size, *inputs), torch.randn(size, *targets)),
        loss=loss,
        optimizer=optimizer,
        batch_size=batch_size,
        clip_grad_norm=clip,
    )


def session_of(job: Job) -> Session:
    """Open a session of a job, with a model that is always the same."""
    torch.manual_seed(0)
    return open_plain_session(job, "cpu", find_layout(job))


def facts_of(job: Job) -> JobFacts:
    """Return what strategies are told of a job."""
    return gather_facts(session_of(job))
