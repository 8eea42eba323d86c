"""The entry of tiling, with the jobs that it is for."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from tests.zoo.planned_jobs import TransformerBlock
from tests.zoo.small_jobs import regression_job
from torch import nn

from memfit import Job
from memfit.strategies.tiling import Tiling

from .builders import (
    Entry,
    one_layer,
    ragged_tokens,
    residual,
    samples_in_second_dimension,
)


class GatedMlp(nn.Module):
    """A gated MLP without biases."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, expansion * width, bias=False)
        self.up = nn.Linear(width, expansion * width, bias=False)
        self.down = nn.Linear(expansion * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def transformer(
    width: int = 8, num_tokens: int = 9, batch_size: int = 6, expansion: int = 4
) -> Job:
    """Return transformer blocks whose MLPs can be tiled; 6 x 9 tokens fall into uneven tiles."""
    mlp = partial(GatedMlp, expansion=expansion)
    blocks = lambda: nn.Sequential(*(TransformerBlock(width, mlp) for _ in range(2)))  # noqa: E731
    return regression_job(blocks, (num_tokens, width), batch_size=batch_size)


def large_transformer() -> Job:
    return transformer(width=64, num_tokens=128, batch_size=8, expansion=8)


def convolutional(channels: int = 3, side: int = 13, batch_size: int = 2) -> Job:
    """Return a chain of convolutions, one of them dilated, between layers that mix positions."""

    def model():
        chain = nn.Sequential(
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * channels, 2 * channels, (5, 3), padding="same", dilation=(2, 1)),
            nn.Tanh(),
            nn.Conv2d(2 * channels, channels, 1),
        )
        return nn.Sequential(chain, nn.MaxPool2d(2), nn.Flatten(1))

    size_out = channels * (side // 2) ** 2
    return regression_job(model, (channels, side, side), (size_out,), batch_size=batch_size)


def over_time(num_steps: int = 23) -> Job:
    """Return dilated convolutions over time."""

    def model():
        layers = [
            layer
            for dilation in (1, 2, 4)
            for layer in (nn.Conv1d(4, 4, 3, padding=dilation, dilation=dilation), nn.GELU())
        ]
        return nn.Sequential(*layers, nn.Conv1d(4, 4, 1))

    return regression_job(model, (4, num_steps), batch_size=3)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        strategy=Tiling,
        settings=tuple(Tiling(num_tiles=num_tiles) for num_tiles in (2, 5, 8)),
        jobs=(
            transformer,
            convolutional,
            over_time,
            residual,
            ragged_tokens,
            samples_in_second_dimension,
        ),
        large_job=large_transformer,
        large_settings=(Tiling(num_tiles=8), Tiling(num_tiles=3)),
        refusal=(Tiling(num_tiles=4), one_layer, "no block of the model treats positions apart"),
    ),
)
