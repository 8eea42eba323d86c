"""The section on scripts that nobody has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pages.blocks import Figures, table

_MIB = 2**20


def scripts(figures: Figures) -> Iterator[str]:
    """Yield the tables of recorded steps, of phases, and of what a prediction costs."""
    rows = figures["rows"]
    yield (
        "Scripts of `benchmarks/scripts`, predicted in an empty folder by the command that a user "
        "types, on the CPU and on a T4 that is not there. Each recorded step on the CPU is held "
        "against the same step of the script's own run, whose bytes the allocator reported "
        "(`measured.json` there); loading, the evaluation and the checkpoint as well, where they "
        "were reached. On the T4 nothing was measured."
    )
    yield table(
        "script | steps, predicted against measured | load | evaluation | checkpoint | T4 | "
        "left on disk",
        "lrrrrrr",
        (_errors(row) for row in rows),
    )
    yield (
        "What a prediction takes, start of Python and imports included; memory is the most that "
        "the command or its recording process held at once:"
    )
    yield table(
        "script | seconds, cpu | seconds, T4 | memory, cpu | lines answered | "
        "files written and dropped",
        "lrrrrr",
        (_costs(row) for row in rows),
    )
    worst = max((abs(row["worst_step_error"]) for row in rows if "step_errors" in row), default=0)
    yield f"The worst step is off by {100 * worst:.2f} %. Lines that a user changes: none."


def _errors(row: Mapping[str, Any]) -> Iterable[object]:
    phases = row.get("phase_errors", {})
    card = row.get("t4", {})
    left = max(row[device]["num_files_left"] for device in ("cpu", "t4") if device in row)
    return (
        f"`{row['script']}`",
        _steps(row.get("step_errors", ())),
        _percent(phases.get("load")),
        _percent(phases.get("evaluation")),
        _percent(phases.get("checkpoint")),
        _mebibytes(card, "peak_allocated_bytes", 1),
        left,
    )


def _costs(row: Mapping[str, Any]) -> Iterable[object]:
    found = row["cpu"]
    return (
        f"`{row['script']}`",
        found["seconds"],
        row.get("t4", {}).get("seconds", "-"),
        _mebibytes(found, "resident_bytes", 0),
        found.get("num_answers", "-"),
        found.get("num_diverted_files", "-"),
    )


def _mebibytes(found: Mapping[str, Any], name: str, num_digits: int) -> str:
    return f"{found[name] / _MIB:.{num_digits}f} MiB" if name in found else "-"


def _steps(errors: Sequence[float]) -> str:
    return ", ".join(map(_percent, errors)) or "-"


def _percent(error: float | None) -> str:
    return (
        "-"
        if error is None
        else f"{100 * error:+.2f} %".replace("+0.00", "0.00").replace("-0.00", "0.00")
    )
