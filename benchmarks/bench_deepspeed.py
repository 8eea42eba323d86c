"""Steps under ZeRO: how far from the whole batch, and what a rank takes against what is predicted.

Run: python benchmarks/bench_deepspeed.py [--json]     (about six minutes on two cores)

Weights are compared with those of plain PyTorch on the whole batch, after five steps in fp32 with
clipping, uneven ranks and pieces. Peaks are the allocator's, of the first rank in its third step.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parent / "ranks"))

import torch
import torch.distributed as dist
from bench_ranks import CountedMemory, compile_counter
from rank_steps import Decoder, Perceptron, adamw, sgd, tokens, vectors
from results_file import save_result
from tests.integrations.deepspeed import engine_ranks
from torch.multiprocessing import spawn

from memfit import Job
from memfit.integrations.deepspeed import ZeroChoice, predict_rank, start

_BUCKET = 1_000_000
_CHOICES = {
    "1": {"stage": 1, "reduce_bucket_elements": _BUCKET},
    "2": {"stage": 2, "reduce_bucket_elements": _BUCKET},
    "2 cpu": {"stage": 2, "reduce_bucket_elements": _BUCKET, "offload_optimizer": "cpu"},
    "3": {"stage": 3, "reduce_bucket_elements": _BUCKET},
}
_OTHERS = (
    ("decoder", "2", 4, 8),
    ("decoder", "3", 4, 4),
    ("uneven, SGD", "1", 2, 4),
    ("uneven, SGD", "2", 4, 8),
    ("uneven, SGD", "3", 4, 4),
)
"""What was measured once the arithmetic was written: job, stage, ranks, micro-batch."""
_PARITY = {2: ("0", "1", "1 cpu", "2", "2 cpu", "3", "3 cpu"), 4: ("0", "1", "2", "2 cpu", "3")}


def _uneven() -> Perceptron:
    return Perceptron(width=509, inner=1021, num_blocks=6)


def _uneven_vectors(batch_size: int) -> torch.Tensor:
    return vectors(batch_size, 509)


_JOBS = {
    "perceptron": (Perceptron, vectors, adamw),
    "decoder": (Decoder, tokens, adamw),
    "uneven, SGD": (_uneven, _uneven_vectors, sgd),
}


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return model(batch)


def _job(name: str) -> Job:
    model, batch, optimizer = _JOBS[name]
    return Job(model=model, batch=batch, loss=_loss, optimizer=optimizer, batch_size=8)


def _choice(name: str, micro: int) -> ZeroChoice:
    return ZeroChoice(micro_batch_size=micro, **_CHOICES[name])


def main() -> None:
    """Compare, measure, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures")
    args = parser.parse_args()
    parity = [row for num_ranks, names in _PARITY.items() for row in parity_rows(num_ranks, names)]
    peaks = [peak_row(job, name) for job in ("perceptron", "decoder") for name in _CHOICES]
    peaks += [peak_row(*each) for each in _OTHERS]
    found = {
        "worst_difference": max(row["largest_difference"] for row in parity),
        "worst_error_fraction": max((row["error_fraction"] for row in peaks), key=abs),
        "num_inside_intervals": sum(row["is_inside_interval"] for row in peaks),
        "parity": parity,
        "peaks": peaks,
    }
    if args.json:
        print(json.dumps(found, indent=1))
    save_result("deepspeed", found)


def parity_rows(num_ranks: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Train each kind on its ranks; the difference is the largest of all ranks and losses."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(
            engine_ranks.trains,
            args=(num_ranks, f"{folder}/store", folder, names),
            nprocs=num_ranks,
        )
        files = [*Path(folder).glob("*.txt")]
        return [
            {
                "stage": name,
                "ranks": num_ranks,
                "largest_difference": max(
                    float(file.read_text()) for file in files if file.stem.rsplit("-", 3)[0] == name
                ),
            }
            for name in names
        ]


def peak_row(job: str, name: str, num_ranks: int = 2, micro: int = 8) -> dict[str, Any]:
    """Predict and measure one step."""
    found = predict_rank(_job(job), _choice(name, micro), num_ranks=num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        with patch.dict(os.environ, LD_PRELOAD=str(compile_counter(folder))):
            spawn(partial(_rank, (job, name, num_ranks, micro), folder), nprocs=num_ranks)
        measured = int((Path(folder) / "peak").read_text())
    row = {
        "job": job,
        "stage": name,
        "ranks": num_ranks,
        "micro_batch_size": micro,
        "measured_peak_bytes": measured,
        "predicted_peak_bytes": found.peak_bytes,
        "low_bytes": found.interval.low_bytes,
        "high_bytes": found.interval.high_bytes,
        "error_fraction": round(found.peak_bytes / measured - 1, 3),
        "is_inside_interval": found.interval.low_bytes <= measured <= found.interval.high_bytes,
        "terms": {term.name: term.num_bytes for term in found.terms},
    }
    print(json.dumps(row), file=sys.stderr)
    return row


def _rank(case: tuple[str, str, int, int], folder: str, rank: int) -> None:
    job, name, num_ranks, micro = case
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), DS_ACCELERATOR="cpu"
    )
    patience = timedelta(seconds=300)
    dist.init_process_group("gloo", f"file://{folder}/store", patience, num_ranks, rank)
    memory = CountedMemory(folder)
    made = _job(job)
    run = start(made, _choice(name, micro))
    batch = made.batch(8)
    for _ in range(2):
        run.step(batch)
    peak_bytes = memory.peak_bytes(lambda: run.step(batch))
    if rank == 0:
        (Path(folder) / "peak").write_text(str(peak_bytes))
    dist.barrier()


if __name__ == "__main__":
    main()
