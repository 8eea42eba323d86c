"""The picture of a model's calibration: how often what it calls likely comes true."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from memfit.errors import MissingExtraError
from memfit.reports.plots import png_bytes

from .evaluation import NUM_BINS, Answers, calibration_bins, calibration_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OUTCOMES = {"event": "event", "severe": "severe event"}
_COLOUR, _GAP_COLOUR, _EVEN_COLOUR = "#2a6f97", "#d1495b", "#888888"


def calibration_picture(answers: Answers) -> bytes:
    """Draw a reliability diagram of both outcomes, with the clips of each bin, as PNG.

    Bins are those of the calibration error: 15 of equal width. Source: Guo et al. 2017, "On
    Calibration of Modern Neural Networks", figure 1.

    Raises:
        MissingExtraError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("calibration.png", "matplotlib", "trident") from None
    figure = Figure(figsize=(9, 4.8), dpi=110, layout="constrained")
    axes = figure.subplots(2, len(_OUTCOMES), sharex=True, height_ratios=(3, 1))
    for column, (name, title) in enumerate(_OUTCOMES.items()):
        _draw(axes[0][column], axes[1][column], answers, name)
        axes[0][column].set_title(f"{title}: {axes[0][column].get_title()}", fontsize=10)
    axes[0][0].set_ylabel("share that came true", fontsize=9)
    axes[1][0].set_ylabel("clips", fontsize=9)
    return png_bytes(figure)


def _draw(upper: Axes, lower: Axes, answers: Answers, name: str) -> None:
    """Draw what was said against what came true, and how often it was said."""
    probability, truth = getattr(answers, name), getattr(answers, f"true_{name}")
    bins = calibration_bins(probability, truth)
    places = [(max(math.ceil(said * NUM_BINS), 1) - 0.5) / NUM_BINS for said, _, _ in bins]
    width = 0.9 / NUM_BINS
    upper.plot((0, 1), (0, 1), linestyle="--", color=_EVEN_COLOUR, linewidth=1)
    for said, frequency, _ in bins:
        upper.plot((said, said), (said, frequency), color=_GAP_COLOUR, linewidth=1.5, zorder=2)
    upper.scatter(
        [said for said, _, _ in bins], [frequency for _, frequency, _ in bins],
        color=_COLOUR, s=22, zorder=3,
    )  # fmt: skip
    upper.set_xlim(0, 1)
    upper.set_ylim(-0.03, 1.03)
    upper.grid(alpha=0.25)
    upper.set_title(f"calibration error {calibration_error(probability, truth):.3f}")
    counts = [round(share * len(truth)) for _, _, share in bins]
    drawn = lower.bar(places, counts, width=width, color=_COLOUR)
    lower.bar_label(drawn, fontsize=6, padding=1)
    lower.set_ylim(0, 1.25 * max(counts, default=1))
    lower.set_xlabel("probability that the model gave", fontsize=9)
    for axes in (upper, lower):
        axes.tick_params(labelsize=8)
