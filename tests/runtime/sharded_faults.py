"""Ranks of a sharded model, one of which runs out of memory, and what they end with."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.runtime import sharded_ranks
from tests.runtime.guard_faults import OutOfMemoryAt, ladder_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit import Job, Plan
from memfit.errors import MemfitError, OtherRankError
from memfit.journal.records import OutOfMemoryEvent
from memfit.runtime.guard import step_log
from memfit.runtime.run import Run
from memfit.strategies import build_strategy

SIZES = (13, 12, 11, 14)
"""Of whole batches: what ranks get of them differs."""
MOST_SECONDS = 90
"""A run that takes longer waits for something that does not come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What a run ended with: whole weights and states, and the events."""

    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    events: tuple[OutOfMemoryEvent, ...]
    operators: Sequence[str]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def part_of(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return this rank's rows."""
    rank, num_ranks, size = dist.get_rank(), dist.get_world_size(), len(batch[0])
    return tuple(part[size * rank // num_ranks : size * (rank + 1) // num_ranks] for part in batch)


def ending(run: Run, operators: Sequence[str] = ()) -> Ending:
    states = {
        f"{number}.{name}": _whole(torch.as_tensor(value))
        for number, held in run.optimizer.state_dict()["state"].items()
        for name, value in held.items()
    }
    weights = {name: _whole(value) for name, value in run.model.state_dict().items()}
    return Ending(weights=weights, states=states, events=tuple(run.events), operators=operators)


def trained(job: Job, plan: Plan, *points: int, guard: bool = True) -> Ending:
    """Train on this rank's part of each batch, with faults at operators of these numbers."""
    mode = OutOfMemoryAt(*points)
    with memfit.start(job, plan, guard=guard) as run:
        for seed, size in enumerate(SIZES):
            with mode:
                run.step(part_of(sharded_ranks.rows(size, seed)))
        return ending(run, mode.seen)


def difference(found: Ending, wanted: Ending) -> float:
    """Return the largest difference of weights and states; infinite if there are others."""
    pairs = [(found.weights, wanted.weights), (found.states, wanted.states)]
    if any(one.keys() != other.keys() for one, other in pairs):
        return math.inf
    return max(
        float((one[name].double() - other[name].double()).abs().max())
        for one, other in pairs
        for name in other
    )


def _same() -> Plan:
    return ladder_of(rungs=3)


def _recomputed() -> Plan:
    rung = Plan(strategies=(build_strategy("activation-checkpointing", {"blocks": ["0-1"]}),))
    return Plan(ladder=(rung,))


PLANS: dict[str, tuple[Callable[[], Plan], float]] = {
    "the same plan again": (_same, 0.0),
    "activation checkpointing": (_recomputed, 1e-12),
    "half the micro-batch": (Plan, 1e-12),
}
"""What a run goes on under, and how far it may be from the undisturbed one."""


def small_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(15, 21), nn.GELU(), nn.Linear(21, 15)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(15, 5)).double()


def job_of(num_ranks: int) -> Job:
    def made() -> nn.Module:
        whole = small_model()
        for block in whole[:-1]:
            fully_shard(block)
        return fully_shard(whole)

    return sharded_ranks.job_of(made, sharded_ranks.total, max(SIZES) // num_ranks + 1)


def fails_and_goes_on(
    rank: int, num_ranks: int, store: str, folder: str, numbers: Sequence[int]
) -> None:
    """Run once with a fault for each number, and write what came of it as lines of JSON."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    step_log._FREE_SECONDS = math.inf  # a busy machine is no reason to have nothing to go back to
    wait = timedelta(seconds=10 * MOST_SECONDS)
    dist.init_process_group("gloo", f"file://{store}", wait, num_ranks, rank)
    job = job_of(num_ranks)
    wanted = {name: trained(job, make()) for name, (make, _) in PLANS.items()}
    with Path(folder, f"rank-{rank}.jsonl").open("a") as said:
        for number in numbers:
            faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
            draw = random.Random(number)
            name = [*PLANS][number % len(PLANS)]
            who, share = draw.randrange(num_ranks), draw.random()
            point = 1 + int(share * len(wanted[name].operators))
            began = time.monotonic()
            found = trained(job, PLANS[name][0](), *([point] if who == rank else []))
            row = {
                "number": number,
                "plan": name,
                "who": who,
                "phases": [event.phase for event in found.events],
                "operator": wanted[name].operators[point - 1],
                "difference": difference(found, wanted[name]),
                "bound": PLANS[name][1],
                "seconds": time.monotonic() - began,
            }
            said.write(json.dumps(row) + "\n")
            said.flush()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


class KilledAt(TorchDispatchMode):
    """Kill this process at an operator of some number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._number -= 1
        if self._number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))


def loses_a_rank(rank: int, num_ranks: int, store: str, folder: str, point: int) -> None:
    """Train until the last rank is killed in its second step; write what this one says, and when."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wait = timedelta(minutes=20)
    dist.init_process_group("gloo", f"file://{store}", wait, num_ranks, rank)
    batch = part_of(sharded_ranks.rows(12))
    run = memfit.start(job_of(num_ranks), Plan())
    run.step(batch)
    is_last = rank == num_ranks - 1
    began = time.monotonic()
    try:
        with KilledAt(point) if is_last else contextlib.nullcontext():
            run.step(batch)
    except OtherRankError as error:
        said = {"seconds": time.monotonic() - began, "message": str(error)}
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(said))


def evaluates(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Evaluate between steps, on batches that are not even, then run out of memory there."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wait = timedelta(minutes=20)
    dist.init_process_group("gloo", f"file://{store}", wait, num_ranks, rank)
    job, batch = job_of(num_ranks), part_of(sharded_ranks.rows(13, 7))
    plain = trained(job, Plan(), guard=False)
    with memfit.start(job, Plan()) as run:
        for seed, size in enumerate(SIZES):
            mean = float(run.evaluate(batch))
            run.step(part_of(sharded_ranks.rows(size, seed)))
        mean = float(run.evaluate(batch))
        differs = difference(ending(run), plain)
        whole = small_model()
        whole.load_state_dict(plain.weights)
        wanted = float(sharded_ranks.mean(whole, batch))
        began = time.monotonic()
        try:
            with OutOfMemoryAt(name="gelu", most=1) if rank == 0 else contextlib.nullcontext():
                run.evaluate(batch)
        except MemfitError as error:
            name = type(error).__name__
    said = {"differs": differs, "off": abs(mean - wanted), "error": name}
    said["seconds"] = time.monotonic() - began
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(said))
