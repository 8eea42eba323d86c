"""Pictures of a trained mixture: samples, density, and the training samples nearest to samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from memfit.errors import MissingExtraError
from memfit.reports.plots import png_bytes

from .data import Samples
from .evaluation import (
    compare,
    density_estimate,
    gaussian_negative_log_likelihood,
    nearest,
    negative_log_likelihood,
)
from .model import KernelMixture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .train import WpoSgmTraining


_DATA, _DRAWN, _CENTRES = "#4477aa", "#ee6677", "#1f2429"
_MOST_POINTS = 2000
_GRID = 120
_TILES = 10
"""Pictures in a row."""
LogDensity = Callable[[Tensor], Tensor]


def sample_picture(samples: Samples, drawn: Tensor) -> bytes:
    """Show drawn samples beside test data."""
    if samples.picture_shape is not None:
        return _two_grids(samples, drawn)
    figure = _figure(9.0, 4.4)
    bounds = _bounds(samples.test)
    parts = (("test data", samples.test, _DATA), ("drawn", drawn, _DRAWN))
    for place, (title, points, colour) in enumerate(parts, 1):
        axes = figure.add_subplot(1, 2, place)
        _scatter(axes, points, colour)
        _frame(axes, bounds, f"{title}, {min(len(points), _MOST_POINTS):,}")
    return png_bytes(figure)


def density_picture(samples: Samples, centres: Tensor, log_density: LogDensity) -> bytes:
    """Show contours of a two-dimensional density, the test data and the centres."""
    figure = _figure(6.0, 5.2)
    axes = figure.add_subplot()
    low, high = _bounds(samples.test)
    xs, ys = (torch.linspace(float(low[i]), float(high[i]), _GRID) for i in range(2))
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), dim=-1).reshape(-1, 2)
    values = log_density(grid).reshape(_GRID, _GRID).double().numpy()
    levels = float(values.max()) - np.arange(12.0, -0.1, -1.0)
    filled = axes.contourf(
        xs.numpy(), ys.numpy(), values, levels=levels, cmap="Blues", extend="min"
    )
    figure.colorbar(filled, ax=axes, label="log density")
    test = samples.test[:_MOST_POINTS]
    axes.scatter(test[:, 0], test[:, 1], s=4, c=_DRAWN, linewidths=0, alpha=0.6, label="test data")
    axes.scatter(
        centres[:, 0], centres[:, 1], s=14, c=_CENTRES, marker="x", linewidths=0.8, label="centres"
    )
    axes.legend(loc="upper right", framealpha=0.9)
    _frame(axes, (low, high), "density of the mixture")
    return png_bytes(figure)


def nearest_picture(samples: Samples, drawn: Tensor) -> bytes:
    """Show drawn pictures, and below each the training picture that is nearest."""
    assert samples.picture_shape is not None, "asked for pictures only"
    shown = drawn[: 2 * _TILES]
    found = nearest(shown, samples.train)
    figure = _figure(_TILES * 0.85, 4.4)
    for row in range(4):
        source = shown if row % 2 == 0 else samples.train[found.indices]
        for column in range(_TILES):
            place = row // 2 * _TILES + column
            if place >= len(shown):
                break
            axes = figure.add_subplot(4, _TILES, row * _TILES + column + 1)
            _tile(axes, source[place], samples)
            if row % 2:
                axes.set_title(f"{float(found.distances[place]):.1f}", fontsize=8, pad=2)
            elif column == 0:
                axes.set_title("drawn", fontsize=8, loc="left", pad=2)
    figure.suptitle(
        "drawn, and below it the nearest training picture with its distance", fontsize=10
    )
    return png_bytes(figure)


def _two_grids(samples: Samples, drawn: Tensor) -> bytes:
    figure = _figure(10.0, 5.2)
    for place, (title, pictures) in enumerate((("test data", samples.test), ("drawn", drawn)), 1):
        axes = figure.add_subplot(1, 2, place)
        axes.imshow(_joined(pictures[: _TILES**2], samples), cmap="gray", vmin=0.0, vmax=1.0)
        axes.set_title(title, fontsize=10)
        axes.set_axis_off()
    return png_bytes(figure)


def _joined(pictures: Tensor, samples: Samples) -> np.ndarray:
    """Lay pictures out in rows, with a light line between them."""
    assert samples.picture_shape is not None, "asked for pictures only"
    channels, height, width = samples.picture_shape
    rows = -(-len(pictures) // _TILES)
    sheet = np.ones((rows * (height + 1) - 1, _TILES * (width + 1) - 1, channels), np.float32)
    for number, picture in enumerate(pictures):
        top, left = number // _TILES * (height + 1), number % _TILES * (width + 1)
        sheet[top : top + height, left : left + width] = _pixels(picture, samples)
    return sheet[..., 0] if channels == 1 else sheet


def _tile(axes: Axes, picture: Tensor, samples: Samples) -> None:
    pixels = _pixels(picture, samples)
    axes.imshow(pixels[..., 0] if pixels.shape[2] == 1 else pixels, cmap="gray", vmin=0.0, vmax=1.0)
    axes.set_axis_off()


def _pixels(picture: Tensor, samples: Samples) -> np.ndarray:
    """Return a picture as it was, height by width by channels, from 0 to 1."""
    assert samples.picture_shape is not None, "asked for pictures only"
    low, high = samples.pixel_range
    values = samples.shift + samples.scale * picture.reshape(samples.picture_shape)
    return ((values - low) / (high - low)).clamp(0, 1).permute(1, 2, 0).numpy()


def _scatter(axes: Axes, points: Tensor, colour: str) -> None:
    points = points[:_MOST_POINTS]
    axes.scatter(points[:, 0], points[:, 1], s=4, c=colour, linewidths=0, alpha=0.7)


def _bounds(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the corners of a frame around most of the first two coordinates, with a margin."""
    low, high = points[:, :2].amin(0), points[:, :2].amax(0)
    margin = 0.12 * (high - low)
    return low - margin, high + margin


def _frame(axes: Axes, bounds: tuple[Tensor, Tensor], title: str) -> None:
    low, high = bounds
    axes.set_xlim(float(low[0]), float(high[0]))
    axes.set_ylim(float(low[1]), float(high[1]))
    axes.set_aspect("equal", adjustable="box")
    axes.set_title(title, fontsize=10)
    axes.tick_params(labelsize=8)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError("pictures", "matplotlib", "plots") from None
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


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
