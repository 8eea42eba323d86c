"""The sections on what the workloads reach."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memfit.units import GIB, MIB, format_bytes
from memfit_workloads.trident.benchmark_table.figures import DEVICE, RowFigures
from memfit_workloads.trident.benchmark_table.findings import sentences
from memfit_workloads.trident.benchmark_table.rows import BASELINE, CPU_SIZES
from memfit_workloads.trident.sizes import DOCUMENT, TridentSizes

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


def trident_table(figures: Figures) -> Iterator[str]:
    """Say what the document's variants take, and what removes bytes."""
    rows = [RowFigures.from_json(row) for row in figures["rows"]]
    baseline = next(row for row in rows if row.name == BASELINE)
    yield (
        f"One sample of {_shape(DOCUMENT)}, predicted for `{DEVICE}`: peak allocated, where it "
        "lies in all likelihood, and what the process takes. Claims are the document's, in GB. "
        "Speed is that of a sample against the first row; below 1 is slower."
    )
    yield table(
        "row | plan | claimed | peak, GiB | likely | process | fits | claimed | speed",
        "llrrrrlrr",
        (_card_row(row, baseline) for row in rows),
    )
    yield "\n".join(f"- {sentence}" for sentence in sentences(rows))
    yield (
        f"The same rows, run on the CPU: a quarter of every width, one sample of "
        f"{_shape(CPU_SIZES)}. Their speeds there were not measured in turns, so none is given."
    )
    yield table(
        "row | predicted, MiB | measured | difference",
        "lrrr",
        map(_cpu_row, rows),
    )


def _shape(sizes: TridentSizes) -> str:
    return f"{sizes.num_frames} frames of {sizes.height} x {sizes.width}"


def _short(label: str) -> str:
    """Write the number of names in the place of many of them."""
    return re.sub(
        r"(\w+=)([^ ,)]+(?: [^ ,)]+){2,})",
        lambda found: f"{found[1]}{len(found[2].split())} names",
        label,
    )


def _card_row(row: RowFigures, baseline: RowFigures) -> tuple[str, ...]:
    card = row.card
    return (
        row.title,
        ", ".join(f"`{_short(label)}`" for label in card.strategies),
        row.claim.peak if row.claim else "",
        f"{card.peak_allocated_bytes / GIB:.2f}",
        f"{card.low_bytes / GIB:.0f} to {card.high_bytes / GIB:.0f}",
        f"{card.process_bytes / GIB:.1f}",
        "yes" if card.fits else "no",
        f"{row.claim.speed:.1f} x" if row.claim else "",
        f"{baseline.card.sample_seconds / card.sample_seconds:.2f} x",
    )


def _cpu_row(row: RowFigures) -> tuple[str, ...]:
    cpu = row.cpu
    return (
        row.title,
        f"{cpu.predicted_peak_bytes / MIB:.1f}",
        f"{cpu.peak_allocated_bytes / MIB:.1f}",
        f"{100 * cpu.error_fraction:+.2f} %",
    )
