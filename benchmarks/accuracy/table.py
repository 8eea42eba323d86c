"""The scores as text for a terminal, and as one JSON object per line for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memfit.units import format_bytes

from .metrics import QUANTITIES, Figure, Score, Summary, count_verdicts, summaries

_SIZES = ("median_abs_error", "p95_abs_error", "worst_abs_error")
_LINE_FIELDS = (
    "source",
    "quantity",
    "rows",
    "median_abs_error",
    "p95_abs_error",
    "worst_abs_error",
    "mean_signed_error",
)


def text_table(scores: Sequence[Score]) -> str:
    """Write all scores for people: rows, what could not be predicted, sums, verdicts."""
    width = max(len(score.row.id) for score in scores)
    head = "".join(f"{name:>22}" for name in QUANTITIES)
    below = f"{'predicted     error':>22}" * len(QUANTITIES)
    lines = [f"{'row':{width}}{head}", f"{'':{width}}{below}"]
    lines += [_row_line(score, width) for score in scores if score.figures]
    failed = [score for score in scores if score.failure is not None]
    if failed:
        lines += ["", f"{len(failed)} of {len(scores)} rows have no prediction:"]
        lines += [f"  {score.row.id}: {' '.join(score.failure.split())}" for score in failed]
    lines += ["", *_summary_lines(summaries(scores)), "", *_verdict_lines(scores)]
    return "\n".join(lines)


def json_lines(scores: Sequence[Score]) -> Iterator[str]:
    """Write one JSON object per source and quantity; errors are fractions."""
    for each in summaries(scores):
        fields = asdict(each)
        yield json.dumps({name: fields[name] for name in _LINE_FIELDS})


def percent(fraction: float | None, *, signed: bool = False) -> str:
    """Write a fraction as a percentage; a dash for None."""
    if fraction is None:
        return "-"
    return f"{fraction * 100:+.2f} %" if signed else f"{fraction * 100:.2f} %"


def _row_line(score: Score, width: int) -> str:
    cells = (_cell(score.figures[name]) for name in QUANTITIES)
    return f"{score.row.id:{width}}" + "".join(cells)


def _cell(figure: Figure) -> str:
    return f"{format_bytes(figure.predicted_bytes):>12}{percent(figure.error, signed=True):>10}"


def _summary_lines(found: Sequence[Summary]) -> Iterator[str]:
    width = max((len(each.source) for each in found), default=6)
    heads = ("median", "p95", "worst", "mean signed", "coverage")
    yield f"{'source':{width}} quantity   rows" + "".join(f"{head:>13}" for head in heads)
    for each in found:
        errors = (each.median_abs_error, each.p95_abs_error, each.worst_abs_error)
        cells = [percent(error) for error in errors]
        cells += [percent(each.mean_signed_error, signed=True), percent(each.coverage)]
        line = f"{each.source:{width}} {each.quantity:9} {each.rows:5}"
        yield line + "".join(f"{cell:>13}" for cell in cells)


def _verdict_lines(scores: Sequence[Score]) -> Iterator[str]:
    for source in dict.fromkeys(score.row.source for score in scores):
        count = count_verdicts(score for score in scores if score.row.source == source)
        share = percent(count.wrong_fraction)
        yield (
            f"{source}: {count.wrong} of {count.all} verdicts wrong ({share}; "
            f"{count.wrongly_fits} said to fit that does not); {count.uncertain} limits lie "
            f"inside the stated interval, {count.wrong_and_certain} wrong verdicts outside it"
        )


def summary_head() -> Iterator[str]:
    """Write the head of a table of sums, for a page."""
    yield "| rows of | quantity | rows | median | p95 | worst | mean signed | inside interval |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"


def summary_line(each: Mapping[str, Any]) -> str:
    """Write one sum as a line of that table."""
    sizes = " | ".join(percent(each[name]) for name in _SIZES)
    signed = percent(each["mean_signed_error"], signed=True)
    return (
        f"| {each['source']} | {each['quantity']} | {each['rows']} | {sizes} | {signed} "
        f"| {percent(each['coverage'])} |"
    )
