"""The factor network, and the mixture whose kernels it shapes.

Shape suffixes: B samples, K centres, C centres in a chunk, D dimensions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from memfit.losses import Kernels, mixture_log_density, mixture_score_matching

from .precisions import Precision, blurred
from .sizes import MixtureSizes, precision_of

if TYPE_CHECKING:
    from memfit.losses.ranks import Group


class FactorNetwork(nn.Module):
    """Map a centre to the numbers that make its precision matrix, (C, D) to (C, outputs).

    The last layer begins with zero weights, so that all kernels begin alike; it holds nearly all
    parameters.
    """

    def __init__(self, precision: Precision, num_dimensions: int, depth: int, hidden: int) -> None:
        super().__init__()
        sizes = [num_dimensions, *[hidden] * depth]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.last = nn.Linear(hidden, precision.num_outputs)
        with torch.no_grad():
            self.last.weight.zero_()
            self.last.bias.copy_(precision.initial_bias())

    def forward(self, centres: Tensor) -> Tensor:
        """Return the outputs for centres (C, D)."""
        outputs: Tensor = self.last(self.layers(centres))
        return outputs


class KernelMixture(nn.Module):
    """An equal-weight mixture of Gaussian kernels at fixed centres."""

    centres: Tensor
    places: Tensor

    def __init__(self, sizes: MixtureSizes, centres: Tensor) -> None:
        super().__init__()
        self.group: Group | None = None
        """The ranks whose centres this mixture has a part of; None where it has all."""
        self.sizes = sizes
        self.precision = precision_of(sizes)
        self.network = FactorNetwork(
            self.precision, sizes.num_dimensions, sizes.depth, sizes.hidden_units
        )
        self.register_buffer("centres", centres)
        self.register_buffer("places", self.precision.places(), persistent=False)

    def kernels(self, centres: Tensor) -> Kernels:
        """Make the kernels at centres (C, D)."""
        kernels = self.precision.kernels(centres, self.network(centres), self.places)
        return blurred(kernels, self.sizes.noise) if self.sizes.noise else kernels

    def score_matching(self, samples: Tensor, *, chunk: int | None = None) -> Tensor:
        """Return the implicit score matching objective at samples (B, D)."""
        return mixture_score_matching(
            self.kernels, self.centres, samples, chunk=chunk, group=self.group
        )

    def log_density(self, samples: Tensor, *, chunk: int | None = None) -> Tensor:
        """Return the log-density at samples (B, D), (B,), in nats."""
        return mixture_log_density(
            self.kernels, self.centres, samples, chunk=chunk, group=self.group
        )
