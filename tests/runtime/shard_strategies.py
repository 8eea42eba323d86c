"""What ranks do under strategies that act on forward, loss and blocks: they train as one would."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.runtime.guard_faults import OutOfMemoryAt
from tests.runtime.sharded_faults import MOST_SECONDS, Ending, difference, ending
from tests.runtime.sharded_ranks import joined
from torch import nn

import memfit
from memfit import Job, Plan, Total
from memfit.errors import StrategyError
from memfit.losses import one_to_many_cross_entropy
from memfit.runtime.guard import step_log
from memfit.strategies import build_strategy

EVEN, UNEVEN = (8, 8, 8), (9, 8, 7)
NUM_CLASSES, WIDTH, NUM_TOKENS = 1100, 16, 6
CLIP = 0.05
PIECES = {"micro-batching": {"micro_batch_size": 2}}


class Block(nn.Module):
    """Attention that is asked for its weights, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normal = self.before(hidden)
        return hidden + self.wide(hidden + self.attention(normal, normal, normal)[0])


class Decoder(nn.Module):
    """Tokens in, scores of the next ones out; or their loss, as models of transformers give it."""

    def __init__(self, *, gives_loss: bool = False, is_tied: bool = False) -> None:
        super().__init__()
        self.gives_loss = gives_loss
        self.tokens = nn.Embedding(NUM_CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, NUM_CLASSES, bias=not is_tied)
        if is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if not self.gives_loss:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Ranker(nn.Module):
    """Scores all entities with a loss that can be streamed, inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.entities = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.entities(tokens[:, 0] % 40)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return one_to_many_cross_entropy(hidden, self.entities.weight, None, labels[:, 0] % 40)


def rows(size: int, seed: int = 99) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, NUM_CLASSES, (size, NUM_TOKENS + 1), generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def mean(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def total(model: Any, batch: Any) -> Total:
    """Count the tokens below a bound alone, so that ranks and pieces count differently."""
    labels = batch[1].masked_fill(batch[1] > 600, -100).flatten()
    losses = F.cross_entropy(model(batch[0]).flatten(0, 1), labels, reduction="sum")
    return Total(losses, (labels >= 0).sum())


def inside(model: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch[0], batch[1])
    return loss


def in_fp64(made: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return made().double()


def in_fp32(made: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return made()


def job_of(made: Callable[[], nn.Module], loss: Any) -> Job:
    return Job(
        model=made,
        batch=rows,
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batch_size=max(UNEVEN),
        clip_grad_norm=CLIP,
    )


DECODER = partial(in_fp64, Decoder)
WITH_LOSS = partial(in_fp64, partial(Decoder, gives_loss=True))
TIED = partial(in_fp64, partial(Decoder, is_tied=True))
RANKER = partial(in_fp64, Ranker)

JOBS = {
    "mean": (DECODER, mean),
    "total": (DECODER, total),
    "inside": (WITH_LOSS, inside),
    "tied": (TIED, mean),
    "ranker": (RANKER, inside),
}
HEAD = {"linear-cross-entropy": {"num_rows": 5}}
MOVED = {"activation-offload": {"to": "disk", "min_tensor_bytes": 1}}
FUSED: dict[str, dict[str, Any]] = {"fused-attention": {}}
STREAMED = {"loss-chunking": {"num_candidates": 7}}
TILED = {"tiling": {"num_tiles": 2}}
RECOMPUTED = {"activation-checkpointing": {"blocks": ["blocks.0-1"]}}

SHARED: dict[str, dict[str, Any]] = {
    "ddp": {"ddp": {}},
    "split": {"fsdp2": {}},
    "kept": {"fsdp2": {"shards_after_forward": 1}},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Strategies, and the jobs that they are tried on."""

    strategies: dict[str, dict[str, Any]]
    jobs: Sequence[str] = ("mean", "total")


CASES = {
    "moved": Case(strategies=MOVED),
    "moved in pieces": Case(strategies={**MOVED, **PIECES}),
    "moved and recomputed": Case(strategies={**MOVED, **RECOMPUTED, **PIECES}),
    "fused": Case(strategies=FUSED),
    "fused in pieces": Case(strategies={**FUSED, **PIECES}),
    "streamed": Case(strategies=STREAMED, jobs=("ranker",)),
    "streamed in pieces": Case(strategies={**STREAMED, **PIECES}, jobs=("ranker",)),
    "head": Case(strategies=HEAD, jobs=("mean", "total", "inside", "tied")),
    "head in pieces": Case(strategies={**HEAD, **PIECES}, jobs=("mean", "inside", "tied")),
    "tiled": Case(strategies=TILED),
    "tiled in pieces": Case(strategies={**TILED, **PIECES}),
    "all": Case(strategies={**MOVED, **FUSED, **HEAD, **RECOMPUTED, **PIECES}),
}


def plan_of(settings: dict[str, dict[str, Any]], num_ranks: int | None) -> Plan:
    strategies = tuple(build_strategy(name, chosen) for name, chosen in settings.items())
    return Plan(strategies=strategies, ranks=num_ranks)


def trained_whole(job: Job, sizes: Sequence[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on whole batches, as plain PyTorch."""
    whole, losses = job.model(), []
    optimizer = job.optimizer(whole.parameters())
    for seed, size in enumerate(sizes):
        optimizer.zero_grad()
        loss = job.loss(whole, rows(size, seed))
        loss = loss.sum / loss.count if isinstance(loss, Total) else loss
        loss.backward()
        if job.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(whole.parameters(), job.clip_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, whole.state_dict()


def trained_by_ranks(
    job: Job, plan: Plan, sizes: Sequence[int]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train this rank's part of the same batches."""
    with memfit.start(job, plan, guard=False) as run:
        losses = [
            float(run.step(run.part(rows(size, seed))).loss) for seed, size in enumerate(sizes)
        ]
        return losses, whole_weights(run.model)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each.detach().clone()
        for name, each in model.state_dict().items()
    }


def worst(found: Any, wanted: Any) -> float:
    """Return the largest difference of losses, relative where they are large, and of weights."""
    scale = torch.tensor(wanted[0]).abs().clamp(min=1)
    pairs = [(torch.tensor(found[0]) / scale, torch.tensor(wanted[0]) / scale)]
    pairs += [(found[1][name], each) for name, each in wanted[1].items()]
    return max(float((one.double() - other.double()).abs().max()) for one, other in pairs)


def trains(rank: int, num_ranks: int, store: str, folder: str, names: Sequence[str]) -> None:
    """Train under every plan; write the largest difference from whole batches."""
    joined(rank, num_ranks, store)
    known: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        for each in case.jobs:
            job = job_of(*JOBS[each])
            wanted = known.setdefault(each, trained_whole(job, UNEVEN))
            for shared, how in SHARED.items():
                plan = plan_of({**how, **case.strategies}, num_ranks)
                found = worst(trained_by_ranks(job, plan, UNEVEN), wanted)
                Path(folder, f"{name}, {each}, {shared}-{rank}.txt").write_text(repr(found))
    dist.destroy_process_group()


def overflows(model: nn.Module, batch: Any) -> torch.Tensor:
    """Take a mean over samples, of which some overflow in float16, so on some ranks alone."""
    losses = F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], reduction="none").mean(1)
    return (losses * torch.where(batch[1][:, 0] % 16 == 0, 1e6, 1.0)).mean()


def trained_in_parts(
    job: Job, dtype: torch.dtype, sizes: Sequence[int], num_ranks: int
) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Train on one process under autocast, in the parts that ranks have, as plain PyTorch."""
    whole, losses = job.model(), []
    optimizer = job.optimizer(whole.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    for seed, size in enumerate(sizes):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(num_ranks):
            start, end = size * rank // num_ranks, size * (rank + 1) // num_ranks
            part = tuple(each[start:end] for each in rows(size, seed))
            with torch.autocast("cpu", dtype=dtype):
                share = job.loss(whole, part) * ((end - start) / size)
            scaler.scale(share).backward()
            loss += share.detach().double()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    return losses, whole.state_dict(), scaler.get_scale()


IN_16_BITS: dict[str, tuple[dict[str, dict[str, Any]], Any]] = {
    "bf16": ({"bf16": {}}, mean),
    "fp16": ({"fp16": {}}, mean),
    "fp16 that overflows": ({"fp16": {}}, overflows),
}


def trains_in_16_bits(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Train under autocast; write the difference from one process on the ranks' parts."""
    joined(rank, num_ranks, store)
    for name, (settings, loss) in IN_16_BITS.items():
        job = replace(
            job_of(partial(in_fp32, Decoder), loss),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        )
        dtype = torch.bfloat16 if "bf16" in settings else torch.float16
        for sizes in (EVEN, UNEVEN):
            wanted = trained_in_parts(job, dtype, sizes, num_ranks)
            for shared in ("ddp", "split"):
                plan = plan_of({**SHARED[shared], **settings}, num_ranks)
                found = trained_by_ranks(job, plan, sizes)
                kind = "even" if sizes is EVEN else "uneven"
                said = repr(worst(found, wanted[:2]))
                if "overflows" in name:
                    assert 1 < wanted[2] < 2**16, "some steps are skipped, and not all"
                Path(folder, f"{name}, {shared}, {kind}-{rank}.txt").write_text(said)
    dist.destroy_process_group()


FAILING: dict[str, dict[str, dict[str, Any]]] = {
    "moved": {**MOVED, **RECOMPUTED},
    "head, fused": {**HEAD, **FUSED},
    "tiled": TILED,
    "bf16": {"bf16": {}, **HEAD},
    "fp16": {"fp16": {}, **MOVED},
}
"""Strategies that a rank runs out of memory under."""
RUNGS = 3


def trained_with_faults(
    job: Job, settings: dict[str, dict[str, Any]], *points: int
) -> tuple[Ending, OutOfMemoryAt]:
    """Train on this rank's part, and go on under the same strategies where memory runs out."""
    strategies = plan_of(settings, None).strategies
    rungs = (Plan(strategies=strategies),) * RUNGS
    mode = OutOfMemoryAt(*points)
    with memfit.start(job, Plan(strategies=strategies, ladder=rungs)) as run:
        for seed, size in enumerate(UNEVEN):
            part = run.part(rows(size, seed))
            with mode:
                run.step(part)
        return ending(run, mode.seen), mode


def fails_and_goes_on(
    rank: int, num_ranks: int, store: str, folder: str, numbers: Sequence[int]
) -> None:
    """Run under each kind with faults at random operators; write what came of it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    step_log._FREE_SECONDS = math.inf  # a busy machine is no reason to have nothing to go back to
    wait = timedelta(seconds=10 * MOST_SECONDS)
    dist.init_process_group("gloo", f"file://{store}", wait, num_ranks, rank)
    for name, strategies in FAILING.items():
        is_rounded = "16" in name
        made = partial(in_fp32 if is_rounded else in_fp64, Decoder)
        job = job_of(made, overflows if name == "fp16" else total)
        settings = {"fsdp2": {}, **strategies}
        wanted, _ = trained_with_faults(job, settings)
        for number in numbers:
            faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
            draw = random.Random(f"{name} {number}")
            who, share = draw.randrange(num_ranks), draw.random()
            point = 1 + int(share * len(wanted.operators))
            found, mode = trained_with_faults(job, settings, *([point] if who == rank else []))
            said = {
                "name": name,
                "phases": [event.phase for event in found.events],
                "operator": wanted.operators[point - 1],
                "raised": mode.num_raised,
                "difference": difference(found, wanted),
            }
            with Path(folder, f"faults-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(said) + "\n")
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


IN_LOW_BITS = {"moved": MOVED, "fused": FUSED, "head": HEAD, "tiled": TILED, "bf16": {"bf16": {}}}


def trains_gathered_in_16_bits(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Train with blocks gathered in bfloat16; write the difference that strategies make there."""
    joined(rank, num_ranks, store)
    how = {"fsdp2": {"param_dtype": "bfloat16"}}
    job = replace(
        job_of(partial(in_fp32, Decoder), mean),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    )
    wanted = trained_by_ranks(job, plan_of(how, num_ranks), UNEVEN)
    for name, settings in IN_LOW_BITS.items():
        found = trained_by_ranks(job, plan_of({**how, **settings}, num_ranks), UNEVEN)
        Path(folder, f"{name}-{rank}.txt").write_text(repr(worst(found, wanted)))
    dist.destroy_process_group()


def own_shards(made: Callable[[], nn.Module], *, shards_head: bool) -> nn.Module:
    """Shard as users do: blocks and the model as torch has it by default, or the head as well."""
    from torch.distributed.fsdp import fully_shard

    whole: Any = made()
    for block in whole.blocks:
        fully_shard(block)
    if shards_head:
        fully_shard(whole.head)
    return fully_shard(whole)


OWN = {
    "head": (HEAD, False),
    "head of its own": (HEAD, True),
    "head of its own in pieces": ({**HEAD, **PIECES}, True),
    "moved": ({**MOVED, **PIECES}, False),
    "all": ({**MOVED, **FUSED, **HEAD, **RECOMPUTED, **PIECES}, True),
}


def trains_own_shards(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Train models that their function has sharded; write the difference from whole batches."""
    joined(rank, num_ranks, store)
    wanted = trained_whole(job_of(DECODER, total), UNEVEN)
    for name, (settings, shards_head) in OWN.items():
        made = partial(own_shards, DECODER, shards_head=shards_head)
        job = replace(job_of(made, total), batch_size=max(UNEVEN) // num_ranks + 1)
        with memfit.start(job, plan_of(settings, None), guard=False) as run:
            for seed, size in enumerate(UNEVEN):
                start, end = size * rank // num_ranks, size * (rank + 1) // num_ranks
                run.step(tuple(part[start:end] for part in rows(size, seed)))
            found = worst((wanted[0], whole_weights(run.model)), wanted)
        Path(folder, f"{name}-{rank}.txt").write_text(repr(found))
    dist.destroy_process_group()


def uses_logits_late(rank: int, num_ranks: int, store: str, folder: str) -> None:
    """Read logits after the step that made them, when ranks have given the weight back."""
    joined(rank, num_ranks, store)
    held: list[torch.Tensor] = []

    def keeps(model: Any, batch: Any) -> torch.Tensor:
        logits = model(batch[0])
        held[:] = [logits]
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    said = ""
    job = job_of(partial(own_shards, DECODER, shards_head=True), keeps)
    with memfit.start(job, plan_of(HEAD, None), guard=False) as run:
        run.step(rows(4))
        try:
            held[0].sum()
        except StrategyError as error:
            said = str(error)
    Path(folder, f"said-{rank}.txt").write_text(said)
    dist.destroy_process_group()
