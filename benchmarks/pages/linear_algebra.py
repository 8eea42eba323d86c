"""The section on factorisations and solvers on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import format_bytes

from .blocks import Figures, table


def linear_algebra(figures: Figures) -> Iterator[str]:
    """Say how near predictions of single operators, and of steps that use them, come."""
    operators, steps = figures["operators"], figures["steps"]
    yield (
        "Operators alone, on the CPU: single matrices and batches, square, tall and wide, laid out "
        "in rows, in columns and with gaps, in fp32 and fp64. A peak is what operands, results and "
        "everything inside take together. A single `matrix_exp` depends on the matrix's norm: "
        "predicted is what a large one takes."
    )
    yield table(
        "operator | cases | predicted to the byte | furthest off",
        "lrrr",
        (
            (
                f"`{row['operator']}`",
                row["num_cases"],
                row["num_exact"],
                f"{100 * row['worst_error_fraction']:+.3f} %",
            )
            for row in operators
        ),
    )
    yield (
        "Steps, forward and backward with SGD, of a square weight: losses that factorise and "
        "solve, as public code has them."
    )
    yield table(
        "loss | size | predicted | measured | off",
        "lrrrr",
        (
            (
                f"`{row['form']}`",
                f"{row['size']}, {row['dtype']}",
                format_bytes(row["predicted_peak_bytes"]),
                format_bytes(row["measured_peak_bytes"]),
                f"{row['predicted_peak_bytes'] - row['measured_peak_bytes']:+d} B",
            )
            for row in steps
        ),
    )
