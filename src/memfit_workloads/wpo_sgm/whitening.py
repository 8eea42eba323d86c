"""Whitening: coordinates in which the training samples have unit covariance.

Score matching weighs directions by the square of their scores, so where some vary far less than
others (differences of neighbouring pixels do), training sees little else. Densities are unchanged
but for a factor.

Shape suffixes: N samples, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .data import Samples

_RIDGE = 1e-6
"""Added to the covariance's diagonal, as a share of the mean variance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whitening:
    """An affine map to coordinates of unit covariance, and back."""

    mean: Tensor
    """(D,) float64."""
    covariance_root: Tensor
    """(D, D) float64, symmetric; its square is the covariance."""
    inverse_root: Tensor
    log_volume: float
    """To be added to a log-density of whitened samples for that of the samples as they were."""

    @classmethod
    def of(cls, train: Tensor) -> Whitening:
        """Fit the map to training samples (N, D).

        Source: Kessy et al. 2018, "Optimal whitening and decorrelation" (arXiv 1512.00809), ZCA.
        """
        train = train.double()
        covariance = torch.cov(train.T)
        covariance.diagonal().add_(_RIDGE * covariance.diagonal().mean())
        variances, directions = torch.linalg.eigh(covariance)
        deviations = variances.sqrt()
        return cls(
            mean=train.mean(0),
            covariance_root=directions @ torch.diag(deviations) @ directions.T,
            inverse_root=directions @ torch.diag(1 / deviations) @ directions.T,
            log_volume=-float(deviations.log().sum()),
        )

    def apply(self, samples: Tensor) -> Tensor:
        """Map samples (N, D), in their own precision."""
        return ((samples.double() - self.mean) @ self.inverse_root).to(samples.dtype)

    def undo(self, whitened: Tensor) -> Tensor:
        """Map whitened samples (N, D) back."""
        return (whitened.double() @ self.covariance_root + self.mean).to(whitened.dtype)

    def samples(self, samples: Samples) -> Samples:
        """Map all parts of a data set."""
        return replace(
            samples,
            train=self.apply(samples.train),
            validation=self.apply(samples.validation),
            test=self.apply(samples.test),
            log_volume=self.log_volume,
        )
