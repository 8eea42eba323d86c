"""Any job on several ranks, under every engine: as the whole batch trains, and as was predicted.

Run: torchrun --nproc-per-node N benchmarks/bench_engines.py --job FILE.py:job [--json]

Each rank trains its part of the effective batch, in micro-batches, with the job's clipping, for
five steps of uneven sizes, and is held against plain PyTorch on whole batches. The peak is what
torch's CPU allocator has given since before the model was built (a C compiler counts it).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np  # whose largest value of some that are not numbers is none
import torch
import torch.distributed as dist
from bench_ranks import CountedMemory, compile_counter, settled

import memfit
from memfit.job import Total, build_optimizer, load_job
from memfit.session.conversion import converted
from memfit.strategies import build_strategy
from memfit.strategies.base import Strategy

_NUM_STEPS = 5
_FOLDER = "MEMFIT_COUNTER_FOLDER"
_ENGINES = {
    "ddp": ("ddp", {}),
    "fsdp2": ("fsdp2", {}),
    "fsdp2, kept whole": ("fsdp2", {"shards_after_forward": 1}),
    "fsdp2, reduced once": ("fsdp2", {"reduces_once": True}),
    "fsdp2, offloaded": ("fsdp2", {"offloads": True}),
}


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """What one rank has seen of an engine."""

    engine: str
    ranks: int
    rank: int
    plan: Sequence[str]
    dtype: str
    weight_difference: float
    """The largest, of any weight, against whole batches after five uneven steps."""
    loss_difference: float
    """The largest relative one, of any step."""
    predicted_peak_bytes: int
    measured_peak_bytes: int
    late_peak_bytes: int
    """What a rank takes, as predicted, where a thread of gloo's comes late."""
    free_peak_bytes: int
    """As measured where nothing waits for such threads."""
    error_fraction: float


def main() -> None:
    """Run every engine on this rank, and have the first rank print what all have seen."""
    args = _parser().parse_args()
    with _counted() as folder:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        rows = [asdict(row) for row in _rows(args, folder)]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, rows)
        if dist.get_rank() == 0:
            _show([row for each in found for row in each], as_json=args.json)
        dist.barrier()
        dist.destroy_process_group()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--job", required=True, metavar="FILE.py:NAME")
    parser.add_argument("--engine", action="append", choices=_ENGINES, help="by default all")
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
    plans = _plans(args, ranks)
    predictions = {
        name: memfit.predict(job, plan=plan, ranks=ranks, rank=rank) for name, plan in plans.items()
    }
    weights, losses = _trained_whole(job)
    for name, plan in plans.items():
        prediction = predictions[name]
        found = _Found(weights, losses)
        measured, free = _trained_by_ranks(job, plan, folder, found)
        interval = prediction.intervals.get("allocated")
        predicted = prediction.peak_allocated_bytes
        yield EngineRow(
            engine=name,
            ranks=ranks,
            rank=rank,
            plan=plan.labels(),
            dtype="float64" if args.fp64 else "as the job has it",
            weight_difference=found.weight_difference,
            loss_difference=found.loss_difference,
            predicted_peak_bytes=predicted,
            measured_peak_bytes=measured,
            late_peak_bytes=predicted if interval is None else interval.high_bytes,
            free_peak_bytes=free,
            error_fraction=predicted / measured - 1,
        )


def _plans(args: argparse.Namespace, ranks: int) -> dict[str, memfit.Plan]:
    if args.plan:
        return {Path(args.plan).name: memfit.Plan.load(args.plan)}
    pieces: tuple[Strategy, ...] = ()
    if args.micro_batch:
        pieces = (build_strategy("micro-batching", {"micro_batch_size": args.micro_batch}),)
    return {
        name: memfit.Plan(strategies=(build_strategy(*_ENGINES[name]), *pieces), ranks=ranks)
        for name in args.engine or _ENGINES
    }


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


def _batches(job: memfit.Job) -> Iterator[Any]:
    """Yield the whole batches of the steps: the first is full, others lack a sample or two."""
    for number in range(_NUM_STEPS):
        torch.manual_seed(number)
        yield job.batch(job.batch_size - number % 3)


def _built(job: memfit.Job) -> torch.nn.Module:
    torch.manual_seed(0)
    return job.model()


def _trained_whole(job: memfit.Job) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train on whole batches as plain PyTorch does."""
    model = _built(job)
    optimizer, losses = build_optimizer(job, model.named_parameters()), []
    for batch in _batches(job):
        optimizer.zero_grad()
        found = job.loss(model, batch)
        loss = found.sum / found.count if isinstance(found, Total) else found
        loss.backward()
        if job.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {name: each.detach().clone() for name, each in model.named_parameters()}, losses


class _Found:
    """Differences from whole batches."""

    def __init__(self, weights: dict[str, torch.Tensor], losses: Sequence[float]) -> None:
        self._weights, self._losses = weights, losses
        self.weight_difference = self.loss_difference = 0.0

    def losses(self, losses: Sequence[float]) -> None:
        """Hold losses against those of whole batches."""
        pairs = zip(losses, self._losses, strict=True)
        self.loss_difference = float(np.max([abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]))

    def weights(self, model: torch.nn.Module) -> None:
        """Hold weights, put together from all ranks, against those of whole batches."""
        for name, each in model.named_parameters():
            full: Callable[[], torch.Tensor] = getattr(each, "full_tensor", each.detach)
            difference = float((full().detach() - self._weights[name]).abs().max())
            self.weight_difference = float(np.maximum(self.weight_difference, difference))


def _trained_by_ranks(
    job: memfit.Job, plan: memfit.Plan, folder: str, found: _Found
) -> tuple[int, int]:
    """Train on this rank's parts; return the peak once settled, and that of steps left alone."""
    gc.collect()
    memory = CountedMemory(folder)
    run = memfit.start(replace(job, model=lambda: _built(job)), plan, guard=False)
    losses = []
    for batch in _batches(job):
        part = run.part(batch)
        del batch
        losses.append(float(run.step(part).loss))
        del part
    found.losses(losses)
    found.weights(run.model)
    gc.collect()
    torch.manual_seed(0)
    part = converted_part(run, job)
    with settled():
        measured = max(memory.peak_bytes(lambda: run.step(part)) for _ in range(2))
    free = max(memory.peak_bytes(lambda: run.step(part)) for _ in range(3))
    run.close()
    return measured, free


def converted_part(run: memfit.Run, job: memfit.Job) -> Any:
    """Return this rank's part of a whole batch, with memory of its own."""
    part = run.part(job.batch(job.batch_size))
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, part)


def _show(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    for row in rows:
        print(
            f"{row['engine']:24} rank {row['rank']} of {row['ranks']}: weights "
            f"{row['weight_difference']:.1e}, losses {row['loss_difference']:.1e}, predicted "
            f"{row['predicted_peak_bytes']:,}, measured {row['measured_peak_bytes']:,} "
            f"({row['error_fraction']:+.2%}), free {row['free_peak_bytes']:,}"
        )


if __name__ == "__main__":
    main()
