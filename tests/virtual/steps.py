"""Records steps on a virtual GPU, and reads what they took off their traces."""

from __future__ import annotations

import torch
from tests.zoo.small_jobs import sgd

from memfit.devices.catalogue import load_device
from memfit.prediction.recording import record_steps
from memfit.trace.events import Category

FLOAT, HALF, BOOL, LONG = 4, 2, 1, 8


def recorded(setup, device="a100-40gb", **options):
    """Return the trace of the last of a few steps."""
    return record_steps(setup, load_device(device), **options).steady


def on_card(*shape, **options):
    return torch.zeros(*shape, device="cuda", **options)


def plain_step(model, batch, optimizer) -> None:
    out = model(batch)
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def training(model, *shape, dtype=torch.float32, body=plain_step, optimizer=sgd):
    """Make the setup of a step that trains a model on one batch."""

    def setup():
        built, batch = model().cuda(), on_card(*shape, dtype=dtype)
        built_optimizer = optimizer(built.parameters())
        return lambda: body(built, batch, built_optimizer)

    return setup


def sizes(trace, operator=None, phase=None, category=None) -> list[int]:
    """Return the bytes of allocations, without the workspaces of libraries."""
    return [
        a.num_bytes
        for a in trace.allocations
        if operator in {None, a.operator}
        and phase in {None, a.phase}
        and category in {None, a.category}
        and a.category is not Category.WORKSPACES
    ]
