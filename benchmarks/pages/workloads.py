"""The sections on what the workloads reach."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import format_bytes

from .blocks import Figures, table

_BRANCHES = ("rgb", "infrared", "kinematics", "class")


def trident(figures: Figures) -> Iterator[str]:
    """Say what the demo of TRIDENT-Net reaches on clips that nothing has seen."""
    first = figures["rows"][0]
    yield (
        "`memfit train trident --demo` on three data seeds. Number of clips, epochs and learning "
        "rate were chosen on the validation clips of two other seeds. Area under the ROC curve of "
        "the outer outcome on test clips, fused and by each branch alone. The plan is "
        f"{first['numerics']}: {', '.join(first['strategies'])}. Seconds are of the whole command, "
        "planning among them."
    )
    yield table(
        "data seed | fused | " + " | ".join(_BRANCHES) + " | plain peak | predicted | measured | s",
        "rrrrrrrrrr",
        (
            (
                row["data_seed"],
                f"{row['fused_auroc']:.3f}",
                *(f"{row['branches'][name]:.3f}" for name in _BRANCHES),
                format_bytes(row["plain_peak_bytes"]),
                format_bytes(row["predicted_peak_bytes"]),
                format_bytes(row["measured_peak_bytes"]),
                f"{row['command_seconds']:.0f}",
            )
            for row in figures["rows"]
        ),
    )
    yield (
        "The inner outcome is never likelier than the outer one: "
        f"{figures['largest_violation_fraction']:.1%} of clips violate it."
    )


def trident_plan(figures: Figures) -> Iterator[str]:
    """Say what fits TRIDENT-Net of its document's size on a card of 40 GB."""
    yield (
        f"`memfit {figures['question']}`, with and without `--allow bf16`: 16 clips of 36 frames "
        "of 720 x 1280 to an update. Predicted, on no card. Step times are the roofline's. Seconds "
        "are of the whole command, on a processor that other programs shared."
    )
    yield table(
        "allowed | exit | numerics | plan | allocated | process | step | s",
        "lrllrrrr",
        (
            (
                row["allowed"] or "nothing",
                row["exit_code"],
                row["numerics"],
                ", ".join(row["strategies"]),
                format_bytes(row["peak_allocated_bytes"]),
                format_bytes(row["process_bytes"]),
                f"{row['step_seconds']:.1f} s",
                f"{row['command_seconds']:.0f}",
            )
            for row in figures["rows"]
        ),
    )
    yield "What holds each peak:"
    yield table(
        "allowed | bytes | category | module | operator",
        "lrlll",
        (
            (
                row["allowed"] or "nothing",
                format_bytes(holder["num_bytes"]),
                holder["category"],
                holder["module"] or "the step",
                holder["operator"] or "before it",
            )
            for row in figures["rows"]
            for holder in row["largest"]
        ),
    )
