"""What processes of an Accelerate loop do in the tests: they train as the whole batch does."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.runtime import sharded_ranks as ranks
from torch import nn

from memfit import MemfitError, Plan
from memfit.integrations.accelerate import fit
from memfit.strategies import build_strategy


def accelerator_of(kind: str) -> Any:
    """Accelerate shards only where it finds a GPU, so that its state is told that it does."""
    from accelerate import Accelerator, DistributedType
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    if kind.startswith("fsdp"):
        state: Any = accelerator.state
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=int(kind[-1]), auto_wrap_policy="no_wrap", cpu_offload=False
        )
        state.distributed_type = DistributedType.FSDP
    return accelerator


def joined(rank: int, num_ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", ACCELERATE_USE_CPU="true")
    ranks.joined(rank, num_ranks, store)


def prepared(kind: str) -> tuple[Any, Any, Any]:
    accelerator = accelerator_of(kind)
    model = ranks.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def pieces(size: int) -> Plan:
    return Plan(strategies=(build_strategy("micro-batching", {"micro_batch_size": size}),))


def trains(rank: int, num_ranks: int, store: str, folder: str, kind: str) -> None:
    """Train a loop; write the largest difference from plain PyTorch on the whole batch."""
    joined(rank, num_ranks, store)
    cases = (("mean", ranks.EVEN, None), ("pieces", ranks.EVEN, 2), ("total", ranks.RAGGED, 2))
    for name, sizes, micro in cases:
        accelerator, model, optimizer = prepared(kind)
        loss: Any = ranks.total if name == "total" else ranks.mean
        plan = None if micro is None else pieces(micro)
        run = fit(
            accelerator, model, optimizer, loss, ranks.rows(6), plan=plan, clip_grad_norm=ranks.CLIP
        )
        for seed, size in enumerate(sizes):
            first, last = size * rank // num_ranks, size * (rank + 1) // num_ranks
            run.step(tuple(part[first:last] for part in ranks.rows(size, seed)))
        run.close()
        whole = ranks.expected(sizes)
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        found = {
            key: each.full_tensor() if hasattr(each, "full_tensor") else each
            for key, each in inner.state_dict().items()
        }
        worst = max(float((found[key] - whole[key]).abs().max()) for key in whole)
        (Path(folder) / f"{name}-{rank}.txt").write_text(f"{type(model).__name__} {worst!r}")
    dist.destroy_process_group()


def is_refused(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Ask for what is not there; write what is said."""
    joined(rank, num_ranks, store)
    said = []
    for kind, options in (("fsdp2", {"budget": "1GiB"}), ("fsdp1", {}), ("ddp", {"budget": 10})):
        try:
            accelerator, model, optimizer = (
                (accelerator_of(kind), ranks.model(), None) if kind == "fsdp1" else prepared(kind)
            )
            fit(accelerator, model, optimizer, ranks.mean, ranks.rows(6), **options)
        except MemfitError as error:
            said.append(str(error).replace("\n", " "))
    (Path(folder) / f"said-{rank}.txt").write_text("\n".join(said))
    dist.destroy_process_group()
