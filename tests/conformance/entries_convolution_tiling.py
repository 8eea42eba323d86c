"""The entry of convolution-tiling, with the jobs that it is for."""

from __future__ import annotations

import torch
from tests.zoo.convolution_networks import UNet, UNet3d
from torch import nn

from memfit import Job
from memfit.strategies.convolution_tiling import ConvolutionTiling

from .builders import Entry, one_layer


def _job(model, shape: tuple[int, ...], batch_size: int) -> Job:
    return Job(
        model=model,
        batch=lambda count: torch.rand(count, *shape),
        loss=lambda network, x: _first(network(x)).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=batch_size,
    )


def _first(out):
    return out[0] if isinstance(out, tuple) else out


def images() -> Job:
    return _job(UNet, (3, 37, 51), 2)


def clips() -> Job:
    return _job(UNet3d, (2, 7, 11, 19), 2)


def inside() -> Job:
    """Return a network that is only a part of a model."""
    model = lambda: nn.Sequential(UNet3d(), nn.Dropout(0.0), nn.Flatten(), nn.Linear(7 * 11 * 9, 2))  # noqa: E731
    return _job(model, (2, 7, 11, 9), 2)


def large_images() -> Job:
    return _job(UNet, (3, 192, 208), 2)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=ConvolutionTiling,
        settings=tuple(
            ConvolutionTiling(num_tiles=tiles, recompute=again)
            for tiles, again in ((2, 0.0), (5, 0.25), (11, 1.0))
        ),
        jobs=(images, clips, inside),
        large_job=large_images,
        large_settings=(
            ConvolutionTiling(num_tiles=24, recompute=0.25),
            ConvolutionTiling(num_tiles=8),
        ),
        refusal=(ConvolutionTiling(num_tiles=4), one_layer, "network of convolutions"),
    ),
)
