"""Random draws in the loss and in the model."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from tests.corpus.promises.case import case, layers, make_job
from torch import Tensor, nn

from memfit import Job


def _noisy(draw: Any) -> Job:
    """Make a job whose loss adds what ``draw`` gives for the inputs."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return (model(inputs + draw(inputs)) - targets).square().mean()

    return make_job(lambda: layers(depth=12), loss=loss)


@case
def seeded_by_hand() -> Job:
    """Seed torch in every step."""

    def draw(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return torch.randn_like(x)

    return _noisy(draw)


@case
def own_generator_each_time() -> Job:
    """Make a generator with the same seed in every step."""
    return _noisy(
        lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    )


@case
def generator_that_goes_on() -> Job:
    """Draw from a generator that goes on."""
    source = torch.Generator().manual_seed(3)
    return _noisy(lambda x: torch.randn(x.shape, generator=source, dtype=x.dtype))


@case
def forked_and_seeded() -> Job:
    """Fork the random state and seed it."""

    def draw(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return torch.randn_like(x)

    return _noisy(draw)


@case
def state_put_back() -> Job:
    """Put the random state back after the draw."""

    def draw(x: Tensor) -> Tensor:
        before = torch.get_rng_state()
        noise = torch.randn_like(x)
        torch.set_rng_state(before)
        return noise

    return _noisy(draw)


@case
def one_draw_for_all() -> Job:
    """Draw one scale for the whole batch."""
    return _noisy(lambda x: x * torch.rand((), dtype=x.dtype))


@case
def numpy_seeded() -> Job:
    """Take noise from numpy, seeded anew."""
    return _noisy(
        lambda x: torch.from_numpy(np.random.default_rng(3).normal(size=tuple(x.shape))).to(x)
    )


@case
def python_draw() -> Job:
    """Take one scale from Python's random numbers."""
    return _noisy(lambda x: x * random.random())


@case
def mixed_up() -> Job:
    """Mix each sample with another (mixup)."""
    return _noisy(lambda x: 0.3 * x[torch.randperm(len(x))])


@case
def dropout() -> Job:
    """Drop features."""
    return make_job(lambda: layers(nn.Dropout(0.2), depth=12))


@case
def antithetic() -> Job:
    """Draw noise for one half of the batch, its negative for the other."""

    def draw(x: Tensor) -> Tensor:
        half = torch.randn_like(x[: len(x) // 2])
        return torch.cat([half, -half])

    return _noisy(draw)


@case
def seeded_in_a_layer() -> Job:
    """Seed torch in a layer, by a count."""

    class Seeds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(int(x.shape[1]))
            return x + torch.randn_like(x)

    return make_job(lambda: layers(Seeds(), depth=12))
