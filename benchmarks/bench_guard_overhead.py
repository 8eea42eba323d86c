"""What guard, monitor and journal cost over a bare loop, side by side in one process.

Run: python benchmarks/bench_guard_overhead.py        (about four minutes on two cores)

Bare and guarded steps alternate in short blocks over the same batches, on two models of the same
shape; half-way the models change places, as two models of one process can differ for good by where
their weights lie. What is compared is the sum of all guarded blocks with the sum of all bare ones,
so that what happens now and then (the file that a cut update goes back to, steps that are watched)
counts whole; a median would hide it. The first two blocks of each half are left out: the first file
and the first watched steps are paid once per run, and are told on their own.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from results_file import save_result
from torch import nn

import memfit

_BLOCK_SECONDS = 0.5
_NUM_BLOCKS = 48
_SIZES = ((512, 8, 64), (512, 8, 512), (1024, 8, 256))
"""Width, number of layers, batch size."""


def main() -> None:
    """Compare steps of several lengths."""
    rows = [_row(*sizes) for sizes in _SIZES]
    save_result("guard_overhead", {"rows": rows})
    for row in rows:
        print(row)


def _job(width: int, depth: int, batch_size: int) -> memfit.Job:
    def model() -> nn.Module:
        layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers)

    return memfit.Job(
        model=model,
        batch=lambda size: torch.randn(size, width),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
        batch_size=batch_size,
    )


def _row(width: int, depth: int, batch_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    job = _job(width, depth, batch_size)
    batches = [job.batch(batch_size) for _ in range(10)]
    models = [job.model(), job.model()]
    bare_seconds = min(_time(_bare_step(job, models[0]), batches, 1) for _ in range(3))
    num_steps = max(2, round(_BLOCK_SECONDS / bare_seconds))
    pairs, first_seconds = [], 0.0
    for half in range(2):
        one, other = models[half], models[1 - half]
        found, first_seconds = _compared(job, one, other, batches, num_steps)
        pairs += found
    guarded, alone = (sum(each) for each in zip(*pairs, strict=True))
    return {
        "width": width,
        "num_layers": depth,
        "batch_size": batch_size,
        "num_parameters": sum(p.numel() for p in models[0].parameters()),
        "bare_step_seconds": round(alone / len(pairs) / num_steps, 5),
        "num_steps_each": len(pairs) * num_steps,
        "ratio_of_sums": round(guarded / alone, 4),
        "median_ratio_of_blocks": round(statistics.median(a / b for a, b in pairs), 4),
        "first_step_seconds": round(first_seconds, 3),
    }


def _compared(
    job: memfit.Job, alone: nn.Module, guarded: nn.Module, batches: list[Any], num_steps: int
) -> tuple[list[tuple[float, float]], float]:
    """Give the seconds of guarded and bare blocks in turn, and of the first guarded step."""
    bare = _bare_step(job, alone)
    bare(batches[0])
    with (
        tempfile.TemporaryDirectory() as folder,
        memfit.start(replace(job, model=lambda: guarded), folder=folder) as run,
    ):
        started = time.perf_counter()
        run.step(batches[0])
        first_seconds = time.perf_counter() - started
        pairs = []
        for number in range(_NUM_BLOCKS // 2):
            order = (bare, run.step) if number % 2 else (run.step, bare)
            seconds = {step: _time(step, batches, num_steps) for step in order}
            pairs.append((seconds[run.step], seconds[bare]))
    return pairs[2:], first_seconds


def _bare_step(job: memfit.Job, model: nn.Module) -> Callable[[Any], None]:
    """Give the loop that a user would write."""
    optimizer = job.optimizer(model.parameters())

    def step(batch: Any) -> None:
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _time(step: Callable[[Any], object], batches: list[Any], num_steps: int) -> float:
    started = time.perf_counter()
    for number in range(num_steps):
        step(batches[number % len(batches)])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
