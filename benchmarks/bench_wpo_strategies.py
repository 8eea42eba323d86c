"""What WPO-SGM's strategies take, beside each other: peaks, time, and how exact they are.

Run: python benchmarks/bench_wpo_strategies.py     (about seven minutes of one core)

All are run at a size for a CPU, on one thread, and predicted at the document's size for a card.
Times are of the processor, in turns in one process, so that other programs matter less.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from results_file import save_result
from wpo_strategies.over_ranks import NUM_WARM, run_over_ranks, timed
from wpo_strategies.ways import (
    ALONE,
    AUTO,
    NAIVE,
    NAIVE_PART,
    NUM_RANKS,
    SHARED,
    SINGLE,
    Bench,
    Way,
    difference,
    gradients,
    in_double,
    of_the_document,
    small,
    started,
)

from memfit.devices.catalogue import load_device
from memfit_workloads.planned_memory import PlannedMemory

_NUM_ROUNDS = 9
_NUM_SHARED_ROUNDS = 7


def main() -> None:
    """Run every way, predict it at the document's size, and keep the figures."""
    torch.set_num_threads(1)
    bench = small()
    planned = {way: bench.planned(way) for way in (*ALONE, NAIVE, *SHARED)}
    exact = _gradients(planned[SINGLE])
    alone = _alone({way: planned[way] for way in (*ALONE, NAIVE)}, exact)
    shared = _shared([planned[way] for way in SHARED], exact)
    save_result(
        "wpo_strategies",
        {
            **_sizes(bench),
            "num_rounds": _NUM_ROUNDS,
            "num_shared_rounds": _NUM_SHARED_ROUNDS,
            "num_ranks": NUM_RANKS,
            "num_processors": os.cpu_count(),
            "naive_part": NAIVE_PART,
            "measured": [
                {**_named(way), **_peaks(planned[way], found), **found}
                for way, found in {**alone, **dict(zip(SHARED, shared, strict=True))}.items()
            ],
            "card": _card(),
        },
    )


def _sizes(bench: Bench) -> dict[str, Any]:
    settings = bench.settings(SINGLE)
    return {
        "flags": bench.flags,
        "num_dimensions": bench.samples.num_dimensions,
        "num_centres": settings.model.num_centres,
        "batch_size": settings.batch_size,
        "precision": settings.model.precision,
    }


def _named(way: Way) -> dict[str, Any]:
    return {"flags": way.flags, "num_ranks": way.num_ranks, "is_naive": way.is_naive}


def _peaks(planned: PlannedMemory, found: dict[str, Any]) -> dict[str, Any]:
    """Hold the predicted peak against the measured one, the highest of the ranks'."""
    predicted_bytes = planned.planned.peak_allocated_bytes
    return {
        "strategies": list(planned.plan.labels()),
        "predicted_peak_bytes": predicted_bytes,
        "error_fraction": round(predicted_bytes / found["measured_peak_bytes"] - 1, 6),
    }


def _gradients(planned: PlannedMemory) -> tuple[float, list[torch.Tensor]]:
    """Return loss and gradients of the first step in float64."""
    job = in_double(planned.job)
    with started(job, planned.plan) as run:
        return gradients(run, job.batch(job.batch_size))


def _differences(
    found: tuple[float, list[torch.Tensor]], exact: tuple[float, list[torch.Tensor]]
) -> dict[str, float]:
    return {
        "loss_difference_fraction": abs(found[0] / exact[0] - 1),
        "gradient_difference_fraction": difference(found[1], exact[1]),
    }


def _alone(
    planned: dict[Way, PlannedMemory], exact: tuple[float, list[torch.Tensor]]
) -> dict[Way, dict[str, Any]]:
    """Take steps of the ways in turns in this process."""
    differences = {way: _differences(_gradients(each), exact) for way, each in planned.items()}
    seconds: dict[Way, list[float]] = {way: [] for way in planned}
    with ExitStack() as stack:
        runs = {
            way: stack.enter_context(started(each.job, each.plan)) for way, each in planned.items()
        }
        batch = planned[SINGLE].job.batch(planned[SINGLE].job.batch_size)
        for number in range(NUM_WARM + _NUM_ROUNDS):
            print("round", number, flush=True)
            for way, run in runs.items():
                _, processor_seconds = timed(run, batch)
                seconds[way].append(processor_seconds)
        peaks = {way: run.measured_peak_bytes for way, run in runs.items()}
    steady = {way: each[NUM_WARM:] for way, each in seconds.items()}
    return {
        way: {
            "measured_peak_bytes": peaks[way],
            "step_processor_seconds": round(median(steady[way]), 3),
            "time_over_single": _median_ratio(steady[way], steady[SINGLE]),
            **differences[way],
        }
        for way in planned
    }


def _shared(
    planned: Sequence[PlannedMemory], exact: tuple[float, list[torch.Tensor]]
) -> list[dict[str, Any]]:
    """Take steps over the ranks, and on the first of them steps of all centres in turns."""
    plans = [each.plan for each in planned]
    found = run_over_ranks(SHARED, plans, _NUM_SHARED_ROUNDS)
    return [_of_ranks(ranks, exact) for ranks in found]


def _of_ranks(
    ranks: Sequence[dict[str, Any]], exact: tuple[float, list[torch.Tensor]]
) -> dict[str, Any]:
    """Put what the ranks found together; of differences the worst, of peaks the highest."""
    peaks = [rank["peak_bytes"] for rank in ranks]
    differences = [_differences((rank["loss"], rank["gradients"]), exact) for rank in ranks]
    # The rank that is busiest is what the others wait for.
    busiest = [
        max(turn["processor_seconds"] for turn in at_once)
        for at_once in zip(*(rank["turns"] for rank in ranks), strict=True)
    ]
    first = ranks[0]["turns"]
    elapsed, alone, busy_alone = (
        [turn[name] for turn in first]
        for name in ("seconds", "alone_seconds", "alone_processor_seconds")
    )
    return {
        "measured_peak_bytes": max(peaks),
        "rank_peak_bytes": peaks,
        "step_processor_seconds": round(median(busiest), 3),
        "time_over_single": _median_ratio(busiest, busy_alone),
        "elapsed_over_single": _median_ratio(elapsed, alone),
        **{name: max(each[name] for each in differences) for name in differences[0]},
    }


def _median_ratio(seconds: Sequence[float], single: Sequence[float]) -> float:
    return round(median(mine / its for mine, its in zip(seconds, single, strict=True)), 3)


def _card() -> dict[str, Any]:
    """Predict every way at the document's size; the planner's choice is one of them."""
    bench = of_the_document()
    device = bench.settings(SINGLE).memory_settings.device
    memory_bytes = load_device(device).memory_bytes
    rows = []
    for way in (*ALONE, *SHARED, AUTO, NAIVE):
        print("card", way.flags, flush=True)
        planned = bench.planned(way)
        rows.append(
            {
                **_named(way),
                "strategies": list(planned.plan.labels()),
                "peak_allocated_bytes": planned.planned.peak_allocated_bytes,
                "process_bytes": planned.planned.process_bytes,
                "fits": planned.planned.bounded_bytes() <= memory_bytes,
                "step_seconds": planned.planned.step_seconds,
            }
        )
    return {**_sizes(bench), "device": device, "memory_bytes": memory_bytes, "rows": rows}


if __name__ == "__main__":
    # Threads that wait sleep, so that ranks leave each other's cores alone.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    main()
