"""How good a mixture is: likelihood, distances between distributions, and memorisation.

Shape suffixes: N and M samples, D dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .model import KernelMixture

_ROWS = 256
"""Samples at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The nearest training sample of each of some samples."""

    distances: Tensor
    """(N,)."""
    indices: Tensor
    """(N,) int64, rows of the training samples."""


@torch.no_grad()
def negative_log_likelihood(mixture: KernelMixture, samples: Tensor, *, chunk: int) -> float:
    """Return the mean negative log-likelihood in nats."""
    device = mixture.centres.device
    total = 0.0
    for part in samples.split(_ROWS):
        total -= float(mixture.log_density(part.to(device), chunk=chunk).sum())
    return total / len(samples)


@torch.no_grad()
def score_matching(mixture: KernelMixture, samples: Tensor, *, chunk: int) -> float:
    """Return the mean of the training objective."""
    device = mixture.centres.device
    total = 0.0
    for part in samples.split(_ROWS):
        total += float(mixture.score_matching(part.to(device), chunk=chunk)) * len(part)
    return total / len(samples)


def squared_mmd(a: Tensor, b: Tensor, widths: tuple[float, ...] = (0.5, 1.0, 2.0)) -> float:
    """Return the squared maximum mean discrepancy of two sets of samples, without bias.

    The kernel is a mean of Gaussian ones whose widths are multiples of the median distance within
    ``b``; the estimate may be slightly negative.

    Source: Gretton et al. 2012, "A kernel two-sample test", equation 3; its section 8 for the
    median.
    """
    a, b = a.double(), b.double()
    within = torch.pdist(b[:1000])
    median = float(within.median()) or 1.0

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        squared = torch.cdist(x, y).square_()
        return sum(torch.exp(-squared / (2 * (w * median) ** 2)) for w in widths) / len(widths)  # type: ignore[return-value]  # widths is not empty

    n, m = len(a), len(b)
    own_a = (kernel(a, a).sum() - n) / (n * (n - 1))
    own_b = (kernel(b, b).sum() - m) / (m * (m - 1))
    return float(own_a + own_b - 2 * kernel(a, b).mean())


def sliced_wasserstein(
    a: Tensor, b: Tensor, generator: torch.Generator, num_slices: int = 256
) -> float:
    """Return the sliced 2-Wasserstein distance of two sets of equally many samples.

    Source: Bonneel et al. 2015, "Sliced and Radon Wasserstein barycenters of measures", section 3.
    """
    directions = torch.randn(a.shape[1], num_slices, generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=0)
    num = min(len(a), len(b))
    projected_a = (a[:num].double() @ directions).sort(dim=0).values
    projected_b = (b[:num].double() @ directions).sort(dim=0).values
    return math.sqrt(float((projected_a - projected_b).square().mean()))


def nearest(samples: Tensor, train: Tensor) -> Neighbours:
    """Find the nearest training sample of each sample."""
    found = [torch.cdist(part, train).min(dim=1) for part in samples.split(_ROWS)]
    return Neighbours(
        distances=torch.cat([each.values for each in found]),
        indices=torch.cat([each.indices for each in found]),
    )


def memorisation(samples: Tensor, held_out: Tensor, train: Tensor) -> dict[str, float]:
    """Compare how near samples and held-out data are to the training data.

    The ratio of median distances is about 1 for samples like new data, and near 0 for copies.
    """
    of_samples = float(nearest(samples, train).distances.median())
    of_held_out = float(nearest(held_out, train).distances.median())
    return {
        "distance_to_train": of_samples,
        "distance_of_test_to_train": of_held_out,
        "distance_ratio": of_samples / of_held_out if of_held_out else math.nan,
    }


def gaussian_negative_log_likelihood(train: Tensor, samples: Tensor) -> float:
    """Return the mean negative log-likelihood of samples under one Gaussian fitted to others.

    The covariance is full, with 1e-6 of its mean variance added to the diagonal.
    """
    train, samples = train.double(), samples.double()
    covariance = torch.cov(train.T)
    covariance += (
        1e-6 * covariance.diagonal().mean() * torch.eye(len(covariance), dtype=torch.float64)
    )
    fitted = torch.distributions.MultivariateNormal(train.mean(0), covariance)
    return -float(fitted.log_prob(samples).mean())


def density_estimate(train: Tensor, validation: Tensor, test: Tensor) -> dict[str, float]:
    """Fit a Gaussian kernel density estimate to the training samples.

    Returns:
        ``nll`` of the test samples, and the ``bandwidth`` that gave the least on the validation
        samples.
    """
    bandwidths = torch.logspace(-2, 0.7, 55, dtype=torch.float64).tolist()
    best = min(bandwidths, key=lambda width: _kernel_nll(train, validation, width))
    return {"bandwidth": best, "nll": _kernel_nll(train, test, best)}


def _kernel_nll(train: Tensor, samples: Tensor, kernel_width: float) -> float:
    total, dims = 0.0, train.shape[1]
    for part in samples.double().split(_ROWS):
        squared = torch.cdist(part, train.double()).square_()
        total += float(torch.logsumexp(-squared / (2 * kernel_width**2), dim=1).sum())
    constant = (
        math.log(len(train)) + dims * math.log(kernel_width) + 0.5 * dims * math.log(2 * math.pi)
    )
    return constant - total / len(samples)


def compare(
    drawn: Tensor, held_out: Tensor, train: Tensor, generator: torch.Generator
) -> dict[str, Any]:
    """Return every figure that compares drawn samples with data."""
    return {
        "mmd_squared": squared_mmd(drawn, held_out),
        "sliced_wasserstein": sliced_wasserstein(drawn, held_out, generator),
        **memorisation(drawn, held_out, train),
    }
