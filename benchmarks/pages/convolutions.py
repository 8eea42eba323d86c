"""The section on networks of convolutions that are computed in rows."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import format_bytes, format_fraction

from .blocks import Figures, table


def unet(figures: Figures) -> Iterator[str]:
    """Say what rows take, how exact they are, and what they cost."""
    yield (
        f"One sample in fp32, SGD, `convolution-tiling` with {figures['num_tiles']} tiles of the "
        f"largest stage and {format_fraction(figures['recompute'])} of multiplications at most "
        "done again. Gradients in fp64 at a smaller size beside the plain step, by 3, 7 and 64 "
        "tiles that do not divide the rows: the largest difference as a part of the largest "
        "gradient of the same tensor. Times are CPU seconds of plain and planned steps in turns, "
        "median of the rounds' ratios."
    )
    yield table(
        "network | sample | plain peak | predicted | measured | of plain | time | error",
        "llrrrrrr",
        (
            (
                case["network"],
                " x ".join(map(str, case["shape"])),
                format_bytes(case["plain_measured_peak_bytes"]),
                format_bytes(case["predicted_peak_bytes"]),
                format_bytes(case["measured_peak_bytes"]),
                format_fraction(case["peak_fraction"]),
                f"{case['seconds']['median_ratio']:.2f} x",
                f"{max(row['error'] for row in case['gradient_errors']):.0e}",
            )
            for case in figures["cases"]
        ),
    )
