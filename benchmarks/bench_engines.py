"""Any job on several ranks, under every engine: as the whole batch trains, and as was predicted.

Run: torchrun --nproc-per-node N benchmarks/bench_engines.py --job FILE.py:job [--json]

Each rank trains its part of the effective batch, in micro-batches, with the job's clipping, for
five steps of uneven sizes, and is held against plain PyTorch on whole batches. The peak is what
torch's CPU allocator has given since before the model was built (a C compiler counts it).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_ranks import CountedMemory, compile_counter, settled
from engines.choices import ENGINES, engine_named
from engines.engines import Engine, Forecast, PlanEngine
from engines.rows import EngineRow, show
from engines.whole_batches import Differences, batches

import memfit
from memfit.errors import MemfitError
from memfit.job import load_job
from memfit.session.conversion import converted

_FOLDER = "MEMFIT_COUNTER_FOLDER"


def main() -> None:
    """Run every engine on this rank, and have the first rank print what all have seen."""
    args = _parser().parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with _counted() as folder:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        rows = [asdict(row) for row in _rows(args, folder)]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, rows)
        if dist.get_rank() == 0:
            show([row for each in found for row in each], as_json=args.json)
        dist.barrier()
        dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", required=True, metavar="FILE.py:NAME")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="by default all")
    parser.add_argument("--plan", metavar="FILE", help="run under this plan instead")
    parser.add_argument(
        "--micro-batch", type=int, default=2, metavar="N", help="default 2; 0: none"
    )
    parser.add_argument("--fp64", action="store_true", help="train in double precision")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


@contextmanager
def _counted() -> Iterator[str]:
    """Have this process run under the counter of allocations: it is started once more for that."""
    if _FOLDER not in os.environ:
        folder = tempfile.mkdtemp(prefix="memfit-counter-")
        changed = {_FOLDER: folder, "LD_PRELOAD": str(compile_counter(folder))}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **changed})
    folder = os.environ[_FOLDER]
    try:
        yield folder
    finally:
        for file in Path(folder).iterdir():
            file.unlink()
        Path(folder).rmdir()


def _rows(args: argparse.Namespace, folder: str) -> Iterator[EngineRow]:
    """Predict all engines, as no process group may be open for that; then run them."""
    job = _job(args)
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    engines = _engines(args, ranks)
    forecasts = {name: _forecast(engine, job, ranks, rank) for name, engine in engines.items()}
    whole = Differences(job)
    for name, engine in engines.items():
        forecast = forecasts[name]
        row = EngineRow(
            engine=name,
            ranks=ranks,
            rank=rank,
            plan=engine.labels,
            dtype="float64" if args.fp64 else "as the job has it",
        )
        if isinstance(forecast, str):
            yield replace(row, refused=forecast)
        else:
            yield _run_by_ranks(job, engine, replace(row, **asdict(forecast)), whole, folder)


def _engines(args: argparse.Namespace, ranks: int) -> dict[str, Engine]:
    if args.plan:
        return {Path(args.plan).name: PlanEngine(memfit.Plan.load(args.plan))}
    names = args.engine or ENGINES
    return {name: engine_named(name, ranks, args.micro_batch) for name in names}


def _job(args: argparse.Namespace) -> memfit.Job:
    job = load_job(args.job)
    if not args.fp64:
        return job
    model, batch = job.model, job.batch
    return replace(
        job,
        model=lambda: model().double(),
        batch=lambda size: converted(batch(size), torch.float64),
    )


def _forecast(engine: Engine, job: memfit.Job, ranks: int, rank: int) -> Forecast | str:
    try:
        return engine.forecast(job, ranks, rank)
    except MemfitError as error:
        return str(error)


def _run_by_ranks(
    job: memfit.Job, engine: Engine, row: EngineRow, whole: Differences, folder: str
) -> EngineRow:
    """Train on this rank's parts; return its differences, and its peak settled and left alone."""
    gc.collect()
    memory = CountedMemory(folder)
    with engine.running(job) as live:
        losses = []
        for batch in batches(job):
            part = live.part(batch)
            del batch
            losses.append(live.step(part))
            del part
        with live.weights() as weights:
            row = replace(
                row,
                loss_difference=whole.of_losses(losses),
                weight_difference=whole.of_weights(weights),
            )
        gc.collect()
        torch.manual_seed(0)
        part = torch.utils._pytree.tree_map_only(
            torch.Tensor, torch.clone, live.part(job.batch(job.batch_size))
        )
        with settled():
            measured = max(memory.peak_bytes(lambda: live.step(part)) for _ in range(2))
        free = max(memory.peak_bytes(lambda: live.step(part)) for _ in range(3))
    return replace(
        row,
        measured_peak_bytes=measured,
        free_peak_bytes=free,
        error_fraction=(row.predicted_peak_bytes or 0) / measured - 1,
    )


if __name__ == "__main__":
    main()
