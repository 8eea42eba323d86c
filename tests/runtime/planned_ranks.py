"""What ranks that carry out a plan together do in the tests: they train as whole batches do."""

from __future__ import annotations

import json
import math
import os
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from tests.runtime import sharded_faults
from tests.runtime.sharded_ranks import expected, job_of, joined, mean, model, rows, total

import memfit
from memfit import Job, Plan, Total
from memfit.errors import MemfitError
from memfit.runtime.guard import step_log
from memfit.strategies import build_strategy
from memfit.strategies.plan import in_catalogue_order

SIZES = (13, 12, 11, 12, 13)
PIECES = {"micro-batching": {"micro_batch_size": 2}}
PLANS = {
    "ddp": {"ddp": {}},
    "ddp in pieces": {"ddp": {}, **PIECES},
    "fsdp2": {"fsdp2": {}},
    "kept whole": {"fsdp2": {"shards_after_forward": 1}, **PIECES},
    "reduced once": {"fsdp2": {"reduces_once": True}, **PIECES},
    "offloaded": {"fsdp2": {"offloads": True}, **PIECES},
    "recomputed": {"fsdp2": {}, "activation-checkpointing": {"blocks": ["0-2"]}, **PIECES},
}


def plan_of(name: str, num_ranks: int | None) -> Plan:
    strategies = (build_strategy(each, chosen) for each, chosen in PLANS[name].items())
    return Plan(strategies=tuple(strategies), ranks=num_ranks)


def uneven_total(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Total:
    """Count the rows of class 1 and 2 alone, of which a rank or a piece may have none."""
    counted = (batch[1] > 0) & (batch[1] < 3)
    each = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return Total((each * counted).sum(), counted.sum())


def own_beginning(rank: int) -> torch.nn.Module:
    """Build the model from what each rank has seeded otherwise; the first has the right one."""
    made = model()
    if rank:
        torch.manual_seed(rank)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter)
    return made


def losses_of_whole(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on whole batches, as plain PyTorch."""
    whole, losses = model(), []
    optimizer = job.optimizer(whole.parameters())
    for seed, size in enumerate(SIZES):
        optimizer.zero_grad()
        loss = job.loss(whole, rows(size, seed))
        loss = loss.sum / loss.count if isinstance(loss, Total) else loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), job.clip_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, whole.state_dict()


def trains(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Train under every plan; write the largest difference from whole batches."""
    joined(rank, num_ranks, store)
    for name in PLANS:
        for loss in (mean, uneven_total):
            job = job_of(lambda: own_beginning(rank), loss, SIZES[0])
            losses, whole = losses_of_whole(job)
            with memfit.start(job, plan_of(name, num_ranks), guard=False) as run:
                found = [
                    float(run.step(run.part(rows(size, seed))).loss)
                    for seed, size in enumerate(SIZES)
                ]
                weights = {
                    key: each.full_tensor() if hasattr(each, "full_tensor") else each
                    for key, each in run.model.state_dict().items()
                }
            differences = [(weights[key] - whole[key]).abs().max() for key in whole]
            differences += [torch.tensor(abs(a - b)) for a, b in zip(found, losses, strict=True)]
            worst = float(torch.stack([each.double() for each in differences]).max())
            Path(folder, f"{name}-{loss.__name__}-{rank}.txt").write_text(repr(worst))
    dist.destroy_process_group()


def is_refused(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Ask for what ranks cannot carry out together; write what is said."""
    joined(rank, num_ranks, store)
    coupled = job_of(model, lambda m, b: (m(b[0]) - m(b[0]).mean(0)).square().mean(), 12)
    recurrent = replace(
        job_of(lambda: torch.nn.LSTM(15, 5).double(), lambda m, b: m(b[0])[0].mean(), 12),
        clip_grad_norm=None,
    )
    mean_job = job_of(model, mean, 12)
    tries = (
        (mean_job, plan_of("fsdp2", num_ranks + 1)),
        (mean_job, plan_of("ddp" if rank else "fsdp2", num_ranks)),
        (coupled, plan_of("ddp", num_ranks)),
        (recurrent, plan_of("fsdp2", num_ranks)),
        (job_of(model, mean, 1), plan_of("ddp", num_ranks)),
    )
    said = []
    for job, plan in tries:
        try:
            memfit.start(job, plan, guard=False)
        except MemfitError as error:
            said.append(" ".join(str(error).split()))
    Path(folder, f"said-{rank}.txt").write_text("\n".join(said))
    dist.destroy_process_group()


def recovers(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Have the last rank run out of memory here and there; write how far the ends differ."""
    joined(rank, num_ranks, store)
    warnings.simplefilter("ignore")
    step_log._FREE_SECONDS = math.inf  # a busy machine is no reason to have nothing to go back to
    job = job_of(sharded_faults.small_model, total, max(sharded_faults.SIZES))
    recomputed = build_strategy("activation-checkpointing", {"blocks": ["0-1"]})
    for name in ("ddp", "fsdp2"):
        own = plan_of(name, num_ranks)
        rung = Plan(strategies=in_catalogue_order([*own.strategies, recomputed]))
        for plan in (own, replace(own, ladder=(rung,))):
            wanted = sharded_faults.trained(job, plan)
            worst, events = 0.0, 0
            for share in (0.1, 0.45, 0.7, 0.97):
                point = 1 + int(share * len(wanted.operators))
                points = [point] if rank == num_ranks - 1 else []
                found = sharded_faults.trained(job, plan, *points)
                worst = max(worst, sharded_faults.difference(found, wanted))
                events += len(found.events)
            said = {"worst": worst, "events": events}
            Path(folder, f"{name}-{len(plan.ladder)}-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def opens_its_group(rank: int, num_ranks: int, port: int, folder: str) -> None:
    """Start as torchrun does, without a process group, under a plan from a file."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    plan = Plan.load(f"{folder}/plan.yaml")
    with memfit.start(job_of(model, mean, SIZES[0]), plan, guard=False) as run:
        for seed, size in enumerate(SIZES):
            run.step(run.part(rows(size, seed)))
        whole = expected(SIZES)
        found = {key: each.full_tensor() for key, each in run.model.state_dict().items()}
    worst = max(float((found[key] - whole[key]).abs().max()) for key in whole)
    Path(folder, f"worst-{rank}.txt").write_text(repr(worst))
    dist.destroy_process_group()
