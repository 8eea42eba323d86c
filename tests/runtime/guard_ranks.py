"""Processes that train together, one of which runs out of memory at random places."""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.runtime.guard_faults import build_job, ladder_of, same, trained
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memfit
from memfit.errors import MemfitError
from memfit.job import Job
from memfit.runtime.guard import step_log

GROUP_TIMEOUT = timedelta(seconds=60)
MOST_SECONDS = 45.0
"""A run that takes longer has waited for something that did not come."""


@contextlib.contextmanager
def joined(rank: int, num_ranks: int, store: str) -> Any:
    """Be one of several ranks; they meet through a file, so that no port can be taken twice."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    step_log._FREE_SECONDS = math.inf  # a busy machine is no reason to have nothing to go back to
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=GROUP_TIMEOUT,
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class SharedMean(torch.autograd.Function):
    """Average over ranks, forwards and backwards: a loss that talks inside a step."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


def wrapped(job: Job) -> Job:
    """Train in DistributedDataParallel."""
    return replace(job, model=lambda: DistributedDataParallel(job.model()))


def talking(job: Job) -> Job:
    """Let the loss average the outputs over the ranks."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, _ = batch
        return SharedMean.apply(model(inputs)).square().mean()

    return replace(job, loss=loss)


KINDS: dict[str, tuple[Callable[[Job], Job], bool]] = {
    "averaged": (lambda job: job, True),
    "wrapped": (wrapped, False),
    "talking": (talking, False),
}
"""How the ranks share their work, and whether gradients are averaged for them."""


def fails_and_goes_on(
    rank: int, num_ranks: int, store: str, kind: str, num_points: int, seed: int, folder: str
) -> None:
    """Compare runs in which one rank fails with the undisturbed one; write what was wrong."""
    share, average = KINDS[kind]
    plan = ladder_of(rungs=4)
    job = share(build_job(batch_norm=kind != "talking"))
    draw = random.Random(seed)
    wrong = []
    torch.set_num_threads(1)
    with joined(rank, num_ranks, store):
        own_seed = 9 + rank
        run, wanted, operators = trained(job, plan, seed=own_seed, average_gradients=average)
        run.close()
        for number in range(num_points):
            who, point = draw.randrange(num_ranks), draw.randint(1, len(operators))
            faults = (point,) if who == rank else ()
            began = time.monotonic()
            try:
                run, found, _ = trained(
                    job, plan, *faults, seed=own_seed, average_gradients=average
                )
                same(found, wanted)
                if len(run.events) > 1:
                    wrong.append(f"{number}: {len(run.events)} events")
                run.close()
                seconds = time.monotonic() - began
                if seconds > MOST_SECONDS:
                    where = f"rank {who} at {point}, {operators[point - 1]}"
                    wrong.append(f"{number}: {seconds:.0f} s, {where}, {run.events}")
            except (AssertionError, MemfitError, RuntimeError) as error:
                wrong.append(f"{number}: rank {who} at {operators[point - 1]}: {error!r}"[:500])
                break
    Path(folder, f"{kind}-{rank}.txt").write_text("\n".join(wrong) or "fine")


def fails_in_every_kind(
    rank: int, num_ranks: int, store: str, num_points: int, folder: str
) -> None:
    """Do so for one kind after the other, in the same processes."""
    for kind in KINDS:
        fails_and_goes_on(rank, num_ranks, f"{store}-{kind}", kind, num_points, 0, folder)


def fails_otherwise(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Let one rank raise an error of another kind, then die; write what the others make of it."""
    torch.set_num_threads(1)
    said = []
    with joined(rank, num_ranks, store):
        run = memfit.start(build_job(), ladder_of(rungs=4), average_gradients=True)
        batch = run_batch = (torch.randn(8, 6), torch.randint(0, 3, (8,)))
        run.step(batch)
        if rank == 1:
            run_batch = (torch.randn(8, 7), batch[1])
        try:
            run.step(run_batch)
        except MemfitError as error:
            said.append(f"{type(error).__name__}: {error}")
        Path(folder, f"error-{rank}.txt").write_text("\n".join(said))
        if rank == 1:
            os._exit(0)
        try:
            run.step(batch)
        except MemfitError as error:
            said.append(f"{type(error).__name__}: {error}")
        Path(folder, f"error-{rank}.txt").write_text("\n".join(said))


def is_gone_before_the_start(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Leave before the other starts its run; write what that one makes of it, and when."""
    torch.set_num_threads(1)
    with joined(rank, num_ranks, store):
        if rank == 1:
            os._exit(0)
        began = time.monotonic()
        try:
            memfit.start(build_job(), average_gradients=True)
        except MemfitError as error:
            seconds = time.monotonic() - began
            Path(folder, "said.txt").write_text(f"{type(error).__name__} {seconds:.0f}")
