"""What ranks of a sharded model do in the tests: they train as the whole batch on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import memfit
from memfit import Job, Plan, Total
from memfit.errors import StrategyError
from memfit.strategies import build_strategy

EVEN, RAGGED = (12, 12, 8, 12, 12), (13, 12, 11, 12, 13)
CLIP = 0.5


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(15, 47), nn.GELU(), nn.Linear(47, 15)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(15, 5)).double()


def rows(size: int, seed: int = 99) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 15, generator=made, dtype=torch.float64)
    return inputs, torch.randint(0, 5, (size,), generator=made)


def mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def total(model: Any, batch: Any) -> Total:
    return Total(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def sharded(*, reshards: bool) -> Callable[[], nn.Module]:
    from torch.distributed.fsdp import fully_shard

    def made() -> nn.Module:
        whole = model()
        for block in whole[:-1]:
            fully_shard(block, reshard_after_forward=reshards)
        fully_shard(whole)
        return whole

    return made


def job_of(made: Callable[[], nn.Module], loss: Any, batch_size: int) -> Job:
    return Job(
        model=made,
        batch=rows,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batch_size=batch_size,
        clip_grad_norm=CLIP,
    )


def expected(sizes: Sequence[int], gamma: float = 1.0) -> dict[str, torch.Tensor]:
    """Train on whole batches, as plain PyTorch; the rate falls by a factor after two steps."""
    whole = model()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=gamma)
    for seed, size in enumerate(sizes):
        optimizer.zero_grad()
        mean(whole, rows(size, seed)).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
    return whole.state_dict()


def joined(rank: int, num_ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), num_ranks, rank)


PLANS = {
    "as it is": {},
    "pieces": {"micro-batching": {"micro_batch_size": 2}},
    "recomputed": {"activation-checkpointing": {"blocks": ["0-2"]}},
    "loop": {"optimizer-implementation": {"implementation": "loop"}},
    "on disk": {
        "optimizer-offload": {"to": "disk", "min_tensor_bytes": 1},
        "micro-batching": {"micro_batch_size": 2},
    },
}
"""What may go with shards."""


def all_moments_lie_on_disk(run: memfit.Run) -> bool:
    """Return whether the moments lie in the file; a parameter's step count is no moment."""
    states = [each for state in run.optimizer.state.values() for each in state.values()]
    held = [each.to_local() if hasattr(each, "to_local") else each for each in states]
    with Path("/proc/self/maps").open() as maps:
        files = [line.split()[0].split("-") for line in maps if "deleted" in line]
    spans = [(int(first, 16), int(last, 16)) for first, last in files]
    moments = [each for each in held if each.dim() and each.numel()]
    return bool(moments) and all(
        any(first <= each.data_ptr() < last for first, last in spans) for each in moments
    )


def trains(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Train every kind; write the largest difference from the whole batch."""
    joined(rank, num_ranks, store)
    for name, settings in PLANS.items():
        strategies = tuple(build_strategy(each, chosen) for each, chosen in settings.items())
        for sizes, loss in ((EVEN, mean), (RAGGED, total)):
            made = sharded(reshards=name != "loop")
            job = job_of(made, loss, batch_size=max(sizes) // num_ranks + 1)
            with memfit.start(job, Plan(strategies=strategies), guard=False) as run:
                for seed, size in enumerate(sizes):
                    start, end = size * rank // num_ranks, size * (rank + 1) // num_ranks
                    run.step(tuple(part[start:end] for part in rows(size, seed)))
                if name == "on disk":
                    assert all_moments_lie_on_disk(run)
                found = {key: each.full_tensor() for key, each in run.model.state_dict().items()}
            whole = expected(sizes)
            worst = max(float((found[key] - whole[key]).abs().max()) for key in whole)
            path = Path(folder) / f"{name}-{loss.__name__}-{rank}.txt"
            path.write_text(repr(worst))
    dist.destroy_process_group()


def attaches(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Train in a loop of one's own under an attached plan; write the difference from the whole."""
    joined(rank, num_ranks, store)
    whole = sharded(reshards=True)()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    plan = Plan(strategies=(build_strategy("activation-checkpointing", {"blocks": ["0-2"]}),))
    with memfit.attach(whole, optimizer, plan):
        for seed, size in enumerate(RAGGED):
            optimizer.zero_grad()
            start, end = size * rank // num_ranks, size * (rank + 1) // num_ranks
            inputs, labels = (part[start:end] for part in rows(size, seed))
            loss = F.cross_entropy(whole(inputs), labels, reduction="sum") * num_ranks / size
            loss.backward()
            nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
            optimizer.step()
    found = {key: each.full_tensor() for key, each in whole.state_dict().items()}
    wanted = expected(RAGGED)
    worst = max(float((found[key] - wanted[key]).abs().max()) for key in wanted)
    (Path(folder) / f"attached-{rank}.txt").write_text(repr(worst))
    dist.destroy_process_group()


def trains_replicated(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Average over replicas with states on disk; write the difference from the whole batch."""
    joined(rank, num_ranks, store)
    chosen = [build_strategy(each, settings) for each, settings in PLANS["on disk"].items()]
    cases = {
        "wrapped": (lambda: nn.parallel.DistributedDataParallel(model()), EVEN, mean, chosen[:1]),
        "averaged": (model, RAGGED, total, chosen),
    }
    for name, (made, sizes, loss, strategies) in cases.items():
        is_averaged = name == "averaged"
        plan = Plan(strategies=tuple(strategies))
        with memfit.start(job_of(made, loss, 7), plan, average_gradients=is_averaged) as run:
            scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, gamma=0.5)
            for seed, size in enumerate(sizes):
                start, end = size * rank // num_ranks, size * (rank + 1) // num_ranks
                run.step(tuple(part[start:end] for part in rows(size, seed)))
                scheduler.step()
            assert all_moments_lie_on_disk(run)
            found, whole = run.model.state_dict(), expected(sizes, gamma=0.5)
        worst = max(float((found[key] - whole[key]).abs().max()) for key in whole)
        (Path(folder) / f"{name}-{rank}.txt").write_text(repr(worst))
    dist.destroy_process_group()


def is_refused(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Ask for what does not go with shards; write what is said."""
    joined(rank, num_ranks, store)
    said = []
    cut = Plan(strategies=(build_strategy("cached-gradients", {"micro_batch_size": 2}),))
    pieces = Plan(strategies=(build_strategy("micro-batching", {"micro_batch_size": 2}),))
    job = job_of(sharded(reshards=True), mean, 6)
    for plan, wanted in ((cut, {}), (Plan(), {"average_gradients": True})):
        try:
            memfit.start(job, plan, guard=False, **wanted)
        except StrategyError as error:
            said.append(str(error))
    made = job.model()
    low_bit = Plan(strategies=(build_strategy("eight-bit-optimizer", {}),))
    try:
        memfit.attach(made, job.optimizer(made.parameters()), low_bit)
    except StrategyError as error:
        said.append(str(error))
    with memfit.start(job, pieces, guard=False) as run:
        try:
            run.step(rows(2 if rank == 0 else 6))
        except StrategyError as error:
            said.append(str(error))
    (Path(folder) / f"said-{rank}.txt").write_text("\n".join(said))
    dist.destroy_process_group()
