"""Shows the planner's benchmark: a table on the terminal, and a section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pages.blocks import table

from memfit.units import format_bytes

from .figures import MODES, Jobs

_HEAD = (
    "job",
    "budget",
    "plan",
    "predicted",
    "measured",
    "guessed",
    "time",
    "measure=True",
    "again",
)


def text_table(jobs: Jobs) -> str:
    """Write a line for each job and budget."""
    rows = [_HEAD, *_rows(jobs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def section(figures: Mapping[str, Any]) -> Iterator[str]:
    """Write what stands below the heading."""
    total = figures["summary"]
    times, noise = total["time_over_best"], total["time_again_over_time"]
    yield (
        f"{total['num_jobs']} jobs, {total['num_cells']} budgets in all, as parts of the peak "
        f"of the job as it is, planned with guessed times, with those of a calibrated "
        f"processor and with `measure=True`: "
        f"{total['num_within_budget']} of {total['num_plans']} plans were measured within the "
        f"budget, {total['num_right_refusals']} of {total['num_refusals']} refusals were "
        f"right: none of {total['num_enumerated']} enumerated plans fits there either. "
        f"Predicted against measured peak: median error "
        f"{total['median_abs_error_fraction']:.4%}, worst "
        f"{total['worst_abs_error_fraction']:.3%}."
    )
    yield (
        "Seconds of a step over those of the best plan that an enumeration of all settings "
        "found for the budget, timed in short turns while the models of all live, which every "
        "round builds anew (median of the turns' ratios):"
    )
    yield table(
        "| median | 10th percentile | 90th percentile | worst | within 5 %",
        "lrrrrr",
        [
            *((_WORDS[mode], *_cells(times[mode])) for mode in MODES),
            ("the same plan timed twice", *_cells(noise)),
        ],
    )
    yield (
        f"Every exact strategy that applies to a job, alone, mildest and strongest, in fp64: "
        f"{total['num_kept_promises']} of {total['num_proofs']} keep their promise, largest "
        f"relative error {total['largest_proven_error']:.1e}."
    )
    if "remark" in figures:
        yield figures["remark"]
    if total["faults"]:
        yield "Not as promised:"
        yield "\n".join(f"- {fault}" for fault in total["faults"])
    yield "Each job and budget; times are over the best, the last column is the noise:"
    yield table(
        "job | budget | plan | predicted | measured | "
        "time, guessed | time | time, `measure=True` | again",
        "lrlrrrrrr",
        _rows(figures["jobs"]),
    )


_WORDS = {
    "guessed": "plan, by the catalogue's guesses for any processor",
    "estimated": "plan, after `memfit calibrate --device cpu`",
    "measured": "plan, `measure=True`",
}


def _rows(jobs: Jobs) -> Iterator[tuple[str, ...]]:
    for name, job in jobs.items():
        for cell in job["cells"]:
            yield (name, f"{cell['budget_fraction']:.0%}", *_answer(cell))


def _answer(cell: Mapping[str, Any]) -> tuple[str, ...]:
    mine, other = cell["estimated"], cell["measured"]
    if "strategies" not in mine:
        smallest_bytes = mine.get("smallest_peak_bytes")
        why = "no answer" if smallest_bytes is None else f"none: {format_bytes(smallest_bytes)}"
        return (f"{why} at least" if smallest_bytes else why, "", "", "", "", "", "")
    return (
        _names(mine["strategies"]),
        format_bytes(mine["predicted_bytes"]),
        format_bytes(mine["measured_bytes"]),
        _ratio(cell["guessed"].get("time_over_best")),
        _ratio(mine["time_over_best"]),
        _ratio(other.get("time_over_best")),
        _ratio(mine["time_again_over_time"]),
    )


def _names(labels: list[str]) -> str:
    """Write strategies without what they keep or name, which may take a page."""
    short = (label if len(label) < _LONG else label.partition("(")[0] for label in labels)
    return " + ".join(dict.fromkeys(short)) or "as it is"


_LONG = 40


def _cells(values: Mapping[str, float]) -> tuple[str, ...]:
    shown = (f"{values[name]:.3f}" for name in ("median", "p10", "p90", "worst"))
    return (*shown, f"{values['within_5_percent']:.0%}")


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
