"""What a trained mixture comes to: figures against held-out data, pictures and words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.errors import MissingExtraError

from .evaluation import (
    compare,
    density_estimate,
    gaussian_negative_log_likelihood,
    negative_log_likelihood,
)
from .model import KernelMixture
from .pictures import density_picture, nearest_picture, sample_picture

if TYPE_CHECKING:
    from .train import WpoSgmTraining


def final_metrics(
    training: WpoSgmTraining, mixture: KernelMixture, drawn: Tensor, generator: torch.Generator
) -> dict[str, Any]:
    """Compare a mixture with held-out data, and with two simple densities."""
    data, samples, state = training.data, training.samples, training.state
    test_nll = negative_log_likelihood(mixture, samples.test, chunk=training.chunk)
    estimate = density_estimate(data.train, data.validation, data.test)
    metrics = {
        "loss": state.history[-1]["loss"],
        "valid_nll": state.best_nll if state.best_nll is not None else math.nan,
        "test_nll": test_nll - samples.log_volume,
        "gaussian_test_nll": gaussian_negative_log_likelihood(data.train, data.test),
        "density_estimate_test_nll": estimate["nll"],
        **compare(drawn, data.test, data.train, generator),
    }
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def drawn_pictures(
    training: WpoSgmTraining, mixture: KernelMixture, drawn: Tensor
) -> dict[str, bytes]:
    """Draw the pictures by file name, where matplotlib is installed."""
    data = training.data

    @torch.no_grad()
    def log_density(points: Tensor) -> Tensor:
        points = training.whitened(points).to(mixture.centres.device)
        found = mixture.log_density(points, chunk=training.chunk).cpu()
        return found + training.samples.log_volume

    try:
        pictures = {"samples.png": sample_picture(data, drawn)}
        if data.num_dimensions == 2:
            centres = training.unwhitened(training.centres)
            pictures["density.png"] = density_picture(data, centres, log_density)
        if data.picture_shape is not None:
            pictures["nearest.png"] = nearest_picture(data, drawn)
    except MissingExtraError as error:
        training.console.print(f"No pictures: {error}", soft_wrap=True)
        return {}
    return pictures


def result_lines(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    """Say what came out."""
    shown = {
        name: "no number" if value is None else f"{value:.4f}" for name, value in metrics.items()
    }
    likelihoods = (
        f"test NLL {shown['test_nll']}, of one Gaussian {shown['gaussian_test_nll']}, of a kernel "
        f"density estimate {shown['density_estimate_test_nll']}"
    )
    distances = (
        f"drawn samples against test data: squared MMD {shown['mmd_squared']}, sliced "
        f"Wasserstein {shown['sliced_wasserstein']}, distance to training data "
        f"{shown['distance_ratio']} times that of test data"
    )
    return likelihoods, distances
