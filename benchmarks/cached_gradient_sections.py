"""The section of the benchmark page on losses that couple samples."""

from __future__ import annotations

from typing import Any

from memfit.units import format_bytes


def cached_gradients_section(figures: dict[str, Any]) -> list[str]:
    """Return how exact cached gradients are, how their peak grows, and what they cost."""
    cases = figures["cases"]
    lines = [
        (
            f"A transformer encoder with dropout, {figures['layers']} layers of width "
            f"{figures['width']}, {figures['tokens']} tokens a sample, representations of "
            f"{figures['out']} numbers, AdamW; in pieces of {figures['piece']}. In-batch negatives "
            "encode queries and documents. Gradients in fp64 at the larger batch, on one layer, "
            "largest relative error over parameters: with dropout beside one pass over the whole "
            "batch that draws the same masks, and without dropout beside the plain step. Times are "
            "CPU seconds of plain and planned steps in turns, median of the rounds' ratios."
        ),
        "",
        "| loss | error with dropout | without | plain peak | peak | time over the plain step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {case['loss']} | {case['gradient_error_with_dropout']:.1e} | "
        f"{case['gradient_error_without_dropout']:.1e} | "
        f"{format_bytes(case['plain_measured_peak_bytes'])} | "
        f"{format_bytes(case['peaks'][-1]['measured_peak_bytes'])} | "
        f"{case['seconds']['median_ratio']:.2f} x |"
        for case in cases
    ]
    return [*lines, "", *_growth(cases), ""]


def _growth(cases: list[dict[str, Any]]) -> list[str]:
    growths = "; ".join(
        f"{case['loss']} {case['growth_fraction']:.1%}, and {case['growth_beside_fraction']:.1%} "
        "without what is subtracted"
        for case in cases
    )
    lines = [
        (
            "Measured peaks of a whole step. Subtracted are the batch, the representations and "
            "their gradients, which are those of the whole batch, and nothing else. The loss alone "
            "is a step on representations that are there, with its matrices of all pairs; it has "
            "freed them when the first piece goes backward, so they are no part of these peaks "
            "unless they outgrow a piece."
        ),
        "",
        (
            "| loss | batch | peak | batch itself | representations | their gradients "
            "| one matrix of pairs | the loss alone | peak less the first three |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    keys = (
        "measured_peak_bytes",
        "batch_bytes",
        "representation_bytes",
        "their_gradient_bytes",
        "matrix_of_pairs_bytes",
        "loss_alone_peak_bytes",
        "beside_bytes",
    )
    for case in cases:
        for row in case["peaks"]:
            cells = " | ".join(format_bytes(row[key]) for key in keys)
            lines.append(f"| {case['loss']} | {row['batch_size']} | {cells} |")
    return [*lines, "", f"Growth from the smaller to the larger batch: {growths}."]
