"""Mean and variance of groups of channels, gathered tile by tile."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SINGLE_BYTES = 4


@dataclass(slots=True)
class Statistics:
    """Mean and variance of each group of a norm's input, each (B, G), in fp32 or fp64."""

    mean: Tensor
    variance: Tensor
    count: int
    affine: tuple[Tensor, Tensor] | None = None
    """Scale and shift of each channel, (B, C, 1, …), leaves that collect gradients in backward."""


def wide(tensor: Tensor) -> Tensor:
    """Return half precision in single precision."""
    return tensor.float() if tensor.element_size() < SINGLE_BYTES else tensor


def merged(first: Statistics, second: Statistics) -> Statistics:
    """Merge the statistics of two parts (Chan et al. 1979, STAN-CS-79-773, equation 2.1)."""
    count = first.count + second.count
    apart = second.mean - first.mean
    part = second.count / count
    variance = (
        first.variance * (1 - part) + second.variance * part + apart.square() * part * (1 - part)
    )
    return Statistics(first.mean + apart * part, variance, count)
