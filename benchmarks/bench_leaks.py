"""Which planted leaks are named, and after how many steps; alarms of clean runs; the overhead.

Run: python benchmarks/bench_leaks.py        (about a minute on two cores)

Each program runs with the finder as it comes. The overhead is measured on steps of a small
convolutional network: blocks with and without calls of ``boundary`` alternate in one process, and
neighbouring blocks are compared.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from leak_programs.clean import CLEAN
from leak_programs.planted import PLANTED
from leak_programs.training import Program, text_of_line
from paired_timing import ratio_figures, take_turns
from results_file import save_result
from torch import nn

from memfit.journal.records import LeakEvent
from memfit.observe.leaks import LeakFinder

_NUM_BLOCKS = 80
_STEPS_PER_BLOCK = 20
_BATCH_SIZE = 32


class CountingFinder(LeakFinder):
    """Count the steps until something is told."""

    def __init__(self) -> None:
        super().__init__(self._told)
        self.num_steps = 0
        self.found_after: int | None = None

    def boundary(self, stream: str, step: int, batch_bytes: int | None = None) -> None:
        """Count a step."""
        self.num_steps += 1
        super().boundary(stream, step, batch_bytes)

    def _told(self, _: LeakEvent) -> None:
        self.found_after = self.found_after or self.num_steps


def main() -> None:
    """Run all programs, measure the overhead and save everything."""
    torch.manual_seed(0)
    rows = [_planted_row(program) for program in PLANTED]
    clean = [_clean_row(program) for program in CLEAN]
    for row in rows:
        print(row["found_after_steps"], row["kind"], row["holder"], row["line"], sep="\t")
    save_result(
        "leaks",
        {
            "rows": rows,
            "clean_rows": clean,
            "num_planted": len(rows),
            "num_holders_named": sum(row["is_holder_named"] for row in rows),
            "num_lines_wanted": sum(bool(program.line) for program in PLANTED),
            "num_lines_named": sum(row["is_line_named"] for row in rows),
            "num_clean": len(clean),
            "num_alarms": sum(row["num_alarms"] for row in clean),
            **_overhead(),
        },
    )


def _planted_row(program: Program) -> dict[str, Any]:
    gc.collect()
    finder = CountingFinder()
    program.run(finder)
    event = next(iter(finder.findings), None)
    line = event.source_line if event is not None else ""
    return {
        "name": program.name,
        "kind": event.kind if event is not None else "",
        "is_kind_named": event is not None and event.kind == program.kind,
        "num_events": len(finder.findings),
        "num_steps": finder.num_steps,
        "found_after_steps": finder.found_after,
        "holder": event.holder if event is not None else "",
        "is_holder_named": event is not None
        and (event.holder == program.holder or event.holder.endswith(f".{program.holder}")),
        "line": line,
        "is_line_named": bool(program.line) and program.line in text_of_line(line),
        "sentence": event.sentence if event is not None else "",
    }


def _clean_row(program: Program) -> dict[str, Any]:
    gc.collect()
    finder = CountingFinder()
    program.run(finder)
    return {
        "name": program.name,
        "num_steps": finder.num_steps,
        "num_alarms": len(finder.findings),
        "spent_seconds": round(finder.spent_seconds, 4),
    }


def _overhead() -> dict[str, Any]:
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten()),
        nn.Linear(16 * 28 * 28, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(_BATCH_SIZE, 3, 32, 32)
    lasting = LeakFinder()

    def take_steps(told: Callable[[int], object]) -> None:
        for step in range(_STEPS_PER_BLOCK):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            told(step)

    def bare(_: int) -> None:
        take_steps(lambda _: None)

    def watched(number: int) -> None:
        take_steps(lambda step: lasting.boundary("train", number * _STEPS_PER_BLOCK + step))

    bare(0)
    started = time.perf_counter()
    rounds = list(take_turns([watched, bare], range(_NUM_BLOCKS)))
    run_seconds = time.perf_counter() - started
    return {
        "num_overhead_steps": _NUM_BLOCKS * _STEPS_PER_BLOCK,
        "bare_step_seconds": round(
            statistics.median(seconds for _, seconds in rounds) / _STEPS_PER_BLOCK, 5
        ),
        **ratio_figures([ours / seconds for ours, seconds in rounds]),
        "spent_seconds": round(lasting.spent_seconds, 4),
        "run_seconds": round(run_seconds, 2),
        "budget_seconds": round(0.05 + 0.005 * run_seconds, 4),
        "boundary_seconds": _empty_boundary_seconds(),
        "num_alarms_of_overhead_run": len(lasting.finish()),
    }


def _empty_boundary_seconds() -> float:
    """Return the median time of a call at which nothing is due."""
    finder = LeakFinder()
    times = []
    for step in range(20_000):
        started = time.perf_counter()
        finder.boundary("train", step)
        times.append(time.perf_counter() - started)
    return round(statistics.median(times), 8)


if __name__ == "__main__":
    main()
