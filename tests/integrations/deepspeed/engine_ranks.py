"""What ranks do under an engine of DeepSpeed in the tests: they train as the whole batch does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit import Job, MemfitError, Plan, Total
from memfit.integrations.deepspeed import EngineRun, ZeroChoice, fit, start
from memfit.strategies import build_strategy

UNEVEN = (16, 13, 12, 15, 14)
"""Samples of all ranks in each step; windows of other lengths and partial ones."""
CLIP, IGNORED = 0.5, -100
CHOICES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "1 cpu": {"stage": 1, "offload_optimizer": "cpu"},
    "2": {"stage": 2},
    "2 cpu": {"stage": 2, "offload_optimizer": "cpu"},
    "3": {"stage": 3, "persistence_elements": 0},
    "3 kept": {"stage": 3},
    "3 cpu": {
        "stage": 3,
        "persistence_elements": 0,
        "offload_optimizer": "cpu",
        "offload_parameters": "cpu",
    },
}


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(15, 47), nn.GELU(), nn.Linear(47, 15)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(15, 5)).to(dtype)


class Recomputed(nn.Sequential):
    """Checkpoints its own blocks, as models of transformers do."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self[:-1]:
            inputs = checkpoint(block, inputs, use_reentrant=False)
        return self[-1](inputs)


def recomputed() -> nn.Module:
    return Recomputed(*model())


def rows(size: int, seed: int = 99, *, is_ragged: bool = False) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 15, generator=made)
    labels = torch.randint(0, 5, (size,), generator=made)
    if is_ragged:  # more in the first rows, so that pieces and ranks have unlike counts
        labels[torch.rand(size, generator=made) > torch.linspace(0.2, 0.9, size)] = IGNORED
        labels[-1] = 0
    return inputs, labels


def mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def total(model: Any, batch: Any) -> Total:
    summed = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
    return Total(summed, (batch[1] != IGNORED).sum())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """At the usual eps of 1e-8 rounding of tiny gradients becomes steps: plain PyTorch in eight
    pieces then differs from itself in one by 1.3e-5.
    """
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)


def job_of(loss: Any, batch_size: int, **options: Any) -> Job:
    settings = {"model": model, "batch": rows, "optimizer": adamw, "clip_grad_norm": CLIP}
    return Job(loss=loss, batch_size=batch_size, **{**settings, **options})


def expected(sizes: Sequence[int], *, is_ragged: bool) -> dict[str, torch.Tensor]:
    """Train on whole batches, as plain PyTorch, with a learning rate that falls."""
    whole = model()
    optimizer = adamw(whole.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for seed, size in enumerate(sizes):
        optimizer.zero_grad()
        mean(whole, rows(size, seed, is_ragged=is_ragged)).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
    return whole.state_dict()


def joined(rank: int, num_ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), DS_ACCELERATOR="cpu"
    )
    patience = timedelta(seconds=300)  # the first start on a machine builds for a minute
    dist.init_process_group("gloo", f"file://{store}", patience, num_ranks, rank)
    from deepspeed.utils import logger

    logger.setLevel("ERROR")


def part_of(batch: tuple[torch.Tensor, ...], rank: int, num_ranks: int) -> Any:
    """Return a rank's part of the samples of all, of other sizes on other ranks."""
    size = len(batch[0])
    first, last = size * rank // num_ranks, size * (rank + 1) // num_ranks
    return tuple(part[first:last] for part in batch)


def worst_difference(run: EngineRun, whole: dict[str, torch.Tensor]) -> float:
    with run.whole_weights() as found:
        assert found.keys() == whole.keys()
        return max(float((found[key] - whole[key]).abs().max()) for key in whole)


def trained(rank: int, num_ranks: int, job: Job, choice: ZeroChoice, plan: Plan | None) -> float:
    """Train under an engine; return the largest difference from the whole batch."""
    is_ragged = job.loss is total
    run = start(job, choice, plan=plan)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, gamma=0.5)
    for seed, size in enumerate(UNEVEN):
        batch = rows(size, seed, is_ragged=is_ragged)
        done = run.step(part_of(batch, rank, num_ranks))
        scheduler.step()
        assert done.is_applied
        assert done.num_samples == size
    difference = worst_difference(run, expected(UNEVEN, is_ragged=is_ragged))
    run.close()
    return difference


def trains(rank: int, num_ranks: int, store: str, folder: str, names: Sequence[str]) -> None:
    """Train every kind; write the largest difference from the whole batch."""
    joined(rank, num_ranks, store)
    blocks = build_strategy("activation-checkpointing", {"blocks": ["0-2"]})
    for name in names:
        shares = name.startswith("3")
        for loss, micro in ((mean, 2), (total, 2), (total, None)):
            choice = ZeroChoice(micro_batch_size=micro, **CHOICES[name])
            made = recomputed if shares and loss is total else model
            plan = None if shares or loss is mean else Plan(strategies=(blocks,))
            job = job_of(loss, 16 // num_ranks, model=made)
            found = trained(rank, num_ranks, job, choice, plan)
            (Path(folder) / f"{name}-{loss.__name__}-{micro}-{rank}.txt").write_text(repr(found))
    dist.destroy_process_group()


def is_refused(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Ask for what would not be exact; write what is said."""
    joined(rank, num_ranks, store)
    pieces = ZeroChoice(stage=2, micro_batch_size=2)
    blocks = Plan(strategies=(build_strategy("activation-checkpointing", {"blocks": ["0-2"]}),))
    others = Plan(strategies=(build_strategy("micro-batching", {"micro_batch_size": 4}),))
    normalised = nn.Sequential(nn.Linear(15, 5), nn.BatchNorm1d(5))
    said = []

    def note(function: Callable[[], object]) -> None:
        try:
            function()
        except MemfitError as error:
            said.append(str(error).replace("\n", " "))

    wide = job_of(mean, 8, model=lambda: model(torch.float64))
    note(lambda: start(wide))
    wrapped = nn.parallel.DistributedDataParallel(model())
    note(lambda: fit(wrapped, adamw(wrapped.parameters()), mean, rows(8)))
    note(lambda: start(job_of(mean, 8, model=lambda: normalised), pieces))
    note(lambda: start(job_of(mean, 8), ZeroChoice(stage=3, micro_batch_size=2), plan=blocks))
    note(lambda: start(job_of(mean, 8), pieces, plan=others))
    note(lambda: start(job_of(mean, 8), pieces, config={}))
    run = start(job_of(mean, 8), pieces)
    note(lambda: run.step(rows(2 if rank == 0 else 8)))
    unlike = rows(8)
    if rank == 0:
        unlike[1][0] = IGNORED
    note(lambda: run.step(unlike))
    assert run.step(rows(8)).is_applied
    (Path(folder) / f"said-{rank}.txt").write_text("\n".join(said))
    run.close()
    dist.destroy_process_group()


class Idle(nn.Sequential):
    """Has a layer that takes no part."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self[1](inputs)


class Tied(nn.Module):
    """Shares a weight between two layers, freezes one, leaves one out; the loss looks inside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(15, 15), nn.Linear(15, 15)
        self.outer.weight = self.inner.weight
        self.frozen, self.unused = nn.Linear(15, 15), nn.Linear(15, 3)
        self.frozen.requires_grad_(False)
        self.unused.requires_grad_(False)
        self.head = nn.Linear(15, 5)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.relu(self.inner(inputs))) * self.scale
        return self.head(torch.relu(self.outer(hidden)))


def of_weights(model: Any, batch: Any) -> torch.Tensor:
    """Add a penalty on a weight itself."""
    return mean(model, batch) + 0.1 * model.head.weight.square().mean()


def called_twice(model: Any, batch: Any) -> torch.Tensor:
    first, second = model(batch[0]), model(batch[0].flip(1))
    return F.cross_entropy(first, batch[1]) + (first - second).square().mean()


def of_parts(model: Any, batch: Any) -> torch.Tensor:
    """Call layers of the model, never the model."""
    hidden = torch.tanh(model.outer(model.frozen(model.inner(batch[0]))))
    return F.cross_entropy(model.head(hidden), batch[1])


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    chosen = list(parameters)
    groups = [{"params": chosen[:2], "lr": 0.1}, {"params": chosen[2:], "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


UNUSUAL: dict[str, dict[str, Any]] = {
    "tied": {"model": Tied, "loss": mean},
    "of weights": {"model": Tied, "loss": of_weights},
    "called twice": {"model": Tied, "loss": called_twice},
    "of parts": {"model": Tied, "loss": of_parts},
    "groups": {"model": model, "loss": mean, "optimizer": in_groups},
    "idle": {"model": lambda: Idle(nn.Linear(15, 5), nn.Linear(15, 5)), "loss": mean},
    "unclipped": {"model": model, "loss": mean, "clip_grad_norm": None},
}


def whole_of(job: Job) -> dict[str, torch.Tensor]:
    """Train a job on whole batches, as plain PyTorch."""
    whole: Any = job.model()
    optimizer: Any = job.optimizer(whole.parameters())  # type: ignore[arg-type]
    for seed, size in enumerate(UNEVEN):
        optimizer.zero_grad()
        loss: Any = job.loss(whole, rows(size, seed))
        loss.backward()
        if job.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(whole.parameters(), job.clip_grad_norm)
        optimizer.step()
    return dict(whole.named_parameters())


def trains_unusual(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Train what engines were not made for; write the largest difference from the whole batch."""
    joined(rank, num_ranks, store)
    for stage in (2, 3):
        for name, options in UNUSUAL.items():
            job = job_of(batch_size=8, **options)
            whole = whole_of(job)
            choice = ZeroChoice(stage=stage, micro_batch_size=4, persistence_elements=0)
            try:
                with start(job, choice) as run:
                    for seed, size in enumerate(UNEVEN):
                        run.step(part_of(rows(size, seed), rank, num_ranks))
                    said = repr(worst_difference(run, whole))
            except MemfitError as error:
                said = str(error)
            (Path(folder) / f"{name}-{stage}-{rank}.txt").write_text(said)
    dist.destroy_process_group()


def trains_living(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Train models that are there already; write the largest difference from the whole batch."""
    joined(rank, num_ranks, store)
    for stage in (0, 2, 3):
        living = model()
        choice = ZeroChoice(stage=stage, micro_batch_size=4, persistence_elements=0)
        optimizer = adamw(living.parameters())
        run = fit(living, optimizer, mean, rows(8), choice, clip_grad_norm=CLIP)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for seed, size in enumerate(UNEVEN):
            run.step(part_of(rows(size, seed), rank, num_ranks))
            scheduler.step()
        difference = worst_difference(run, expected(UNEVEN, is_ragged=False))
        (Path(folder) / f"{stage}-{rank}.txt").write_text(repr(difference))
        run.close()
    dist.destroy_process_group()
