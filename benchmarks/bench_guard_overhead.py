"""What guard, monitor and journal cost over a bare loop, side by side in one process.

Run: python benchmarks/bench_guard_overhead.py        (about ten minutes on two cores)

Four bare steps, four of a run without a guard and four of a guarded one take turns over the same
batches, on three models of the same shape. (Single steps in turns would have the guard's own code
evicted from the caches by three steps of training, not by one.) Models of one process can differ by
one or two hundredths for good by where their weights lie, so there are several rounds, each with
new models. What is compared is the sum of all steps of each loop, so that what happens now and then
(the file that a cut update goes back to, steps that are watched) counts whole; a median would hide
it. The first second of each round is left out, as the first file and the first watched steps are
paid once per run; what they take is told on its own. Two bare loops are compared in the same way:
how far their ratio is from 1 is how far the machine can be trusted.

The process keeps its memory (``_MALLOC``). Left to itself, malloc gives what a step has freed back
to the system or does not, as the last block of the heap happens to lie; new pages then cost either
loop up to a third of its time (0 or 1,900 page faults per step of the same bare loop were seen),
whatever the guard does.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from paired_timing import Step, bare_step, rounds_for, take_turns
from results_file import save_result
from torch import nn

import memfit

_SECONDS = 7.0
"""For the steps of one loop in one round."""
_ROUNDS, _BARE_ROUNDS = 5, 3
_FIRST_SECONDS = 1.0
_BLOCK_STEPS = 4
_SIZES = ((512, 8, 64), (512, 8, 512), (1024, 8, 256))
"""Width, number of layers, batch size."""

_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}
"""Settings of glibc (mallopt(3)), which are read as a process starts."""


@dataclass
class _Times:
    """Seconds of blocks of each loop in turn, those of the first second apart."""

    first: list[list[float]]
    later: list[list[float]]

    def sums(self) -> list[float]:
        return [sum(each) for each in zip(*self.later, strict=True)]

    @property
    def first_extra_seconds(self) -> float:
        return sum(block[0] - block[-1] for block in self.first)


def main() -> None:
    """Compare steps of several lengths."""
    if not _MALLOC.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_MALLOC})
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
    job = _job(width, depth, batch_size)
    batches = [job.batch(batch_size) for _ in range(10)]
    alone = [_two_bare_loops(job, batches, number) for number in range(_BARE_ROUNDS)]
    rounds = [_all_loops(job, batches, number) for number in range(_ROUNDS)]
    num_blocks = sum(len(times.later) for times in rounds)
    bare_seconds = _sums(rounds)[-1] / num_blocks / _BLOCK_STEPS
    return {
        "width": width,
        "num_layers": depth,
        "batch_size": batch_size,
        "num_parameters": sum(p.numel() for p in job.model().parameters()),
        "bare_step_seconds": round(bare_seconds, 5),
        "num_steps_each": _BLOCK_STEPS * num_blocks,
        "ratio_of_sums": _ratio(rounds),
        "ratios_of_rounds": sorted(_ratio([times]) for times in rounds),
        "guard_share": _guard_share(rounds),
        "guard_shares_of_rounds": sorted(_guard_share([times]) for times in rounds),
        "ratio_of_two_bare_loops": _ratio(alone),
        "ratios_of_bare_rounds": sorted(_ratio([times]) for times in alone),
        "first_extra_seconds": round(
            statistics.mean(times.first_extra_seconds for times in rounds), 3
        ),
    }


def _two_bare_loops(job: memfit.Job, batches: list[Any], number: int) -> _Times:
    return _compared([_bare_step(job), _bare_step(job)], batches, number)


def _all_loops(job: memfit.Job, batches: list[Any], number: int) -> _Times:
    """Compare a guarded run, one without a guard, and a bare loop, in this order."""
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as other,
        memfit.start(job, folder=one) as guarded,
        memfit.start(job, folder=other, guard=False) as unguarded,
    ):
        return _compared([guarded.step, unguarded.step, _bare_step(job)], batches, number)


def _compared(loops: list[Step], batches: list[Any], number: int) -> _Times:
    """Take blocks in turn, from the round of this number on."""
    blocks = [_block(step, batches) for step in loops]
    first, later = (
        list(take_turns(blocks, rounds_for(len(loops) * seconds, number + 1)))
        for seconds in (_FIRST_SECONDS, _SECONDS)
    )
    return _Times(first, later)


def _block(step: Step, batches: list[Any]) -> Callable[[int], None]:
    def block(number: int) -> None:
        for each in range(_BLOCK_STEPS * number, _BLOCK_STEPS * (number + 1)):
            step(batches[each % len(batches)])

    return block


def _sums(rounds: list[_Times]) -> list[float]:
    return [sum(each) for each in zip(*(times.sums() for times in rounds), strict=True)]


def _ratio(rounds: list[_Times]) -> float:
    """Return the first loop's time over the last one's."""
    sums = _sums(rounds)
    return round(sums[0] / sums[-1], 4)


def _guard_share(rounds: list[_Times]) -> float:
    """Return what the guard alone adds to the second loop, as a share of the bare one."""
    guarded, unguarded, bare = _sums(rounds)
    return round((guarded - unguarded) / bare, 4)


def _bare_step(job: memfit.Job) -> Step:
    model = job.model()
    return bare_step(job, model, job.optimizer(model.parameters()))


if __name__ == "__main__":
    main()
