"""The section on networks of convolutions that are computed in rows."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import format_bytes

from .blocks import Figures, table


def unet(figures: Figures) -> Iterator[str]:
    """Say what rows take, how exact they are, and what they cost."""
    yield (
        "One sample in fp32, SGD, `convolution-tiling` with so many tiles of the largest stage and "
        "with so much of the multiplications at most "
        "done again. Gradients in fp64 at a smaller size beside the plain step, by 3, 7 and 64 "
        "tiles that do not divide the rows: the largest difference as a part of the largest "
        "gradient of the same tensor. Times are CPU seconds of plain and planned steps in turns, "
        "median of the rounds' ratios."
    )
    yield table(
        "network | sample | tiles | again | plain peak | predicted | measured | of plain"
        " | time | error",
        "llrrrrrrrr",
        (
            (
                case["network"],
                " x ".join(map(str, case["shape"])),
                case["num_tiles"],
                f"{case['recompute']:.0%}",
                format_bytes(case["plain_measured_peak_bytes"]),
                format_bytes(case["predicted_peak_bytes"]),
                format_bytes(case["measured_peak_bytes"]),
                f"{case['peak_fraction']:.1%}",
                f"{case['seconds']['median_ratio']:.2f} x",
                f"{max(row['error'] for row in case['gradient_errors']):.0e}",
            )
            for case in figures["cases"]
        ),
    )
