"""One rank of several: predicted here without the others, and measured on ranks that are there.

Run: python benchmarks/bench_ranks.py [--json] [--only TEXT]     (about ten minutes on two cores)

Each step of ``ranks/rank_steps.py`` is predicted for its first and its last rank, and then run by
as many processes over gloo. The peak is the allocator's: everything that a rank has allocated since
before its model was built, at its highest in the third step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parent / "ranks"))

import torch
import torch.distributed as dist
from rank_steps import CASES, RankCase, Step
from results_file import save_result
from torch.multiprocessing import spawn

from memfit import Prediction, predict_step

_NUM_FIRST, _NUM_SETTLED, _NUM_FREE = 2, 2, 5
_SETTLING_SECONDS = 0.005
_COUNTER = "counted_memory.so"
_PATIENCE = timedelta(seconds=60)


def main() -> None:
    """Predict and measure every step, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the rows")
    parser.add_argument("--only", default="", metavar="TEXT", help="steps with this in their names")
    args = parser.parse_args()
    chosen = [case for case in CASES if args.only in title(case)]
    rows = []
    for case in chosen:
        rows.append(row_of(case))
        print(json.dumps(rows[-1]), file=sys.stderr)
    if args.json:
        print(json.dumps(rows, indent=1))
    if not args.only:
        worst = max(abs(row["error_fraction"]) for row in rows)
        save_result("ranks", {"worst_error_fraction": worst, "rows": rows})


def title(case: RankCase) -> str:
    """Name a step among all."""
    return f"{case.wrapper}: {case.name}, {case.num_ranks} ranks"


def row_of(case: RankCase) -> dict[str, Any]:
    """Predict and measure a step; the error is that of the rank that is farthest off."""
    measured = measured_peaks(case)
    ends = (0, case.num_ranks - 1)
    predictions = [
        predict_step(case.setup, ranks=case.num_ranks, rank=rank, num_steps=_NUM_FIRST + 1)
        for rank in ends
    ]
    predicted = [each.peak_allocated_bytes for each in predictions]
    true = [max(measured[rank][:_NUM_SETTLED]) for rank in ends]
    errors = [found / each - 1 for found, each in zip(predicted, true, strict=True)]
    return {
        "wrapper": case.wrapper,
        "name": case.name,
        "ranks": case.num_ranks,
        "predicted_peak_bytes": predicted,
        "measured_peak_bytes": true,
        "late_peak_bytes": [_late(each) for each in predictions],
        "free_peak_bytes": [max(measured[rank][_NUM_SETTLED:]) for rank in ends],
        "error_fraction": round(max(errors, key=abs), 5),
        "record_seconds": round(max(each.record_seconds for each in predictions), 2),
        "by_category": {name: size for name, size in predictions[0].by_category.items() if size},
    }


def _late(prediction: Prediction) -> int:
    """Return the predicted peak where gloo's threads come late."""
    interval = prediction.intervals.get("allocated")
    return prediction.peak_allocated_bytes if interval is None else interval.high_bytes


def measured_peaks(case: RankCase) -> list[list[int]]:
    """Run a step on its ranks, and return the peaks of the steady steps of each.

    Raises:
        ProcessRaisedException: if a rank fails, or waits for another for too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        with patch.dict(os.environ, LD_PRELOAD=str(compile_counter(folder))):
            spawn(_rank, (CASES.index(case), folder), nprocs=case.num_ranks)
        files = [Path(folder) / f"peaks-{rank}" for rank in range(case.num_ranks)]
        return [json.loads(file.read_text()) for file in files]


def _rank(rank: int, number: int, folder: str) -> None:
    """Be one of the ranks."""
    torch.set_num_threads(1)
    case = CASES[number]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=case.num_ranks,
        timeout=_PATIENCE,
    )
    memory = CountedMemory(folder)
    step = case.setup()
    with settled():
        for _ in range(_NUM_FIRST):
            step()
        peaks = [memory.peak_bytes(step) for _ in range(_NUM_SETTLED)]
    peaks += [memory.peak_bytes(step) for _ in range(_NUM_FREE)]
    (Path(folder) / f"peaks-{rank}").write_text(json.dumps(peaks))
    dist.barrier()
    dist.destroy_process_group()


class CountedMemory:
    """Count what torch's allocator takes from here on; the process was started under the counter.

    Args:
        folder: holds the counter, as ``compile_counter`` leaves it.
    """

    def __init__(self, folder: str) -> None:
        self._counter = ctypes.CDLL(str(Path(folder) / _COUNTER))
        for name in ("counted_bytes", "counted_peak_bytes"):
            getattr(self._counter, name).restype = ctypes.c_long
        gc.collect()
        self._begin_bytes = self._counter.counted_bytes()

    def peak_bytes(self, step: Step) -> int:
        """Do a step, and return the most that was held meanwhile."""
        time.sleep(_SETTLING_SECONDS)
        self._counter.begin_counting()
        step()
        return self._counter.counted_peak_bytes() - self._begin_bytes


def compile_counter(folder: str) -> Path:
    """Compile the counter into a folder."""
    source, library = Path(__file__).parent / "ranks" / "counted_memory.c", Path(folder) / _COUNTER
    compiler = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC"]
    subprocess.run([*compiler, "-o", str(library), str(source), "-ldl", "-lpthread"], check=True)
    return library


@contextmanager
def settled() -> Iterator[None]:
    """Wait after each collective until gloo's threads have let go of it; then it ends here."""

    def settling(exchange: Callable[..., Any]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            work = exchange(*args, **{**kwargs, "async_op": True})
            work.wait()
            time.sleep(_SETTLING_SECONDS)

        return run

    with ExitStack() as stack:
        for name in ("all_gather_single", "reduce_scatter_single"):
            exchange = settling(getattr(dist, name))
            stack.enter_context(patch.object(dist, name, exchange))
        yield


if __name__ == "__main__":
    main()
