"""The section on several ranks: every engine against whole batches, and inside half the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit.units import format_bytes

from .blocks import Figures, table

_ZERO = "zero"


def engines(figures: Figures) -> Iterator[str]:
    """Say how far each engine is from whole batches, and from what was predicted."""
    rows = figures["rows"]
    names = dict.fromkeys(row["engine"] for row in rows)
    yield (
        "Two jobs (a perceptron, and a language model with tied weights and counts that differ "
        "from sentence to sentence) on 2 ranks over gloo, the first on 4 as well, with clipping, "
        "micro-batches of 2 and batches of 14 to 16 samples. "
        "After five steps the largest difference of any weight, and the largest relative one of "
        "any loss, from plain PyTorch on whole batches. AdamW's eps is 1e-4 (jobs.py says why)."
    )
    yield table(
        "engine | fp32 | fp64 | predicted peak, worst | within 64 bytes",
        "lrrrr",
        (_line(name, [row for row in rows if row["engine"] == name]) for name in names),
    )
    yield (
        "Peaks are those of torch's CPU allocator in a later step, each rank waiting a moment "
        "after each collective. Left alone, a thread of gloo's may free its copy late, which the "
        "interval covers. ZeRO is not recorded but computed, runs nothing in fp64, and keeps "
        f"gathered weights longer than they are used. Of its readings {_inside(rows)} lay inside "
        "its interval as that was then."
    )
    yield "Inside half of what DDP takes on each of four ranks, as `memfit plan --ranks 4` has it:"
    yield table(
        "job | DDP | budget | predicted | measured | plan | losses differ by",
        "lrrrrlr",
        (
            (
                row["job"],
                *(format_bytes(row[f"{name}_bytes"]) for name in _HALF_COLUMNS),
                ", ".join(f"`{each}`" for each in row["plan"]),
                f"{row['loss_difference']:.1e}",
            )
            for row in figures["halves"]
        ),
    )


_NEAR_BYTES = 64
_HALF_COLUMNS = ("ddp_peak", "budget", "predicted_peak", "measured_peak")


def _line(name: str, rows: Sequence[Figures]) -> tuple[str, ...]:
    is_near = [
        abs(row["predicted_peak_bytes"] - row["measured_peak_bytes"]) <= _NEAR_BYTES for row in rows
    ]
    worst = max((row["error_fraction"] for row in rows), key=abs)
    return (
        name,
        _difference([row for row in rows if row["dtype"] != "float64"]),
        _difference([row for row in rows if row["dtype"] == "float64"]),
        f"{worst:+.2%}",
        f"{sum(is_near)} of {len(rows)}",
    )


def _inside(rows: Sequence[Figures]) -> str:
    computed = [row for row in rows if row["engine"].startswith(_ZERO)]
    inside = [
        row["low_bytes"] <= row["measured_peak_bytes"] <= row["high_bytes"] for row in computed
    ]
    return f"{sum(inside)} of {len(computed)}"


def _difference(rows: Sequence[Figures]) -> str:
    if not rows:
        return "refused"
    weights, losses = (
        max(row[f"{name}_difference"] for row in rows) for name in ("weight", "loss")
    )
    return f"{weights:.1e}, {losses:.1e}"
