"""Turns the words of a story into a job, its batches and a plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from random_programs.operators import NUM_CLASSES, NUM_FEATURES, NUM_ROWS
from random_programs.program import Program, make_program
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import memfit
from chaos_runs.stories import JobSpec, Story
from memfit import Job, Plan, Total
from memfit.strategies import build_strategy
from memfit.strategies.plan import clash, in_catalogue_order

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_RUNGS = 8
_LEARNING_RATE = 0.01


class _Around(nn.Module):
    """Add what a function of features makes of them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return x + (made[0] if isinstance(made, tuple) else made)


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value)


class _Counting(nn.Module):
    """Keep a count beside the tensors, and compute with it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1.0 + 0.001 * self.calls)

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class _Noise(nn.Module):
    def __init__(self, is_python: bool) -> None:
        super().__init__()
        self.is_python = is_python

    def forward(self, x: Tensor) -> Tensor:
        if self.is_python:
            return x * (1 + 0.01 * random.random()) + 0.01 * float(np.random.random())
        return x + 0.01 * torch.randn_like(x)


class _MovingAverage(nn.Module):
    """Keep a mean of what it has seen in a buffer that it writes in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x - self.mean


def _layer(name: str, width: int) -> nn.Module:
    makers = {
        "linear": lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh()),
        "mlp": lambda: _Around(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        ),
        "norm": lambda: nn.LayerNorm(width),
        "batch norm": lambda: nn.BatchNorm1d(NUM_ROWS),
        "dropout": lambda: nn.Dropout(0.2),
        "attention": lambda: _Around(_Attention(width)),
        "convolution": lambda: _Around(nn.Conv1d(NUM_ROWS, NUM_ROWS, 3, padding=1)),
        "recurrent": lambda: _Around(nn.GRU(width, width, batch_first=True)),
        "frozen": lambda: nn.Linear(width, width).requires_grad_(requires_grad=False),
        "counting": _Counting,
        "noise": lambda: _Noise(is_python=False),
        "python noise": lambda: _Noise(is_python=True),
        "moving average": lambda: _MovingAverage(width),
        "tied": lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU()),
    }
    return makers[name]()


class Network(nn.Module):
    """Map ``(samples, rows, features)`` to the same shape, in blocks."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__()
        self.enter = nn.Linear(NUM_FEATURES, spec.width)
        self.blocks = nn.Sequential(*(_layer(name, spec.width) for name in spec.layers))
        tied = [
            block[0] for name, block in zip(spec.layers, self.blocks, strict=True) if name == "tied"
        ]
        for each in tied[1:]:
            each.weight = tied[0].weight
        self.leave = nn.Linear(spec.width, NUM_FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        """Map features in blocks."""
        return self.leave(self.blocks(self.enter(x)))


def _entries(batch: Any) -> tuple[Tensor, Tensor]:
    return (batch["x"], batch["y"]) if isinstance(batch, Mapping) else (batch[0], batch[1])


def _loss(spec: JobSpec) -> Any:
    program: Program | None = make_program(spec.seed) if spec.loss == "program" else None

    def loss(model: nn.Module, batch: Any) -> Any:
        inputs, labels = _entries(batch)
        if program is not None:
            return program.loss(model, (inputs, labels))
        made = model(inputs)
        if spec.loss == "squares":
            return made.square().mean()
        if spec.loss == "smooth":
            return F.smooth_l1_loss(made, torch.ones_like(made), reduction="sum") / len(made)
        if spec.loss == "contrast":
            scores = made.flatten(1) @ made.flatten(1).T
            return F.cross_entropy(scores, torch.arange(len(scores)))
        scores = made.flatten(1)[:, :NUM_CLASSES]
        if spec.loss == "total":
            return Total(F.cross_entropy(scores, labels, reduction="sum"), len(labels))
        if spec.loss == "ragged total":
            counted = (labels > 0).to(scores.dtype)
            each = F.cross_entropy(scores, labels, reduction="none")
            return Total((each * counted).sum(), counted.sum())
        return F.cross_entropy(scores, labels)

    return loss


def _optimizer(spec: JobSpec) -> Any:
    rate = _LEARNING_RATE

    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        listed = [*parameters]
        groups = [{"params": listed[:1], "lr": rate / 2}, {"params": listed[1:], "lr": rate}]
        return torch.optim.SGD(groups, momentum=0.9, nesterov=True, weight_decay=1e-3)

    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=rate),
        "momentum": lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=rate, amsgrad=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=rate),
        "fused adamw": lambda p: torch.optim.AdamW(p, lr=rate, fused=True),
        "foreach adamw": lambda p: torch.optim.AdamW(p, lr=rate, foreach=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=rate, centered=True, momentum=0.5),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=rate),
        "nadam": lambda p: torch.optim.NAdam(p, lr=rate),
        "adamax": lambda p: torch.optim.Adamax(p, lr=rate),
        "two groups": two_groups,
    }
    return makers[spec.optimizer]


def job_of(spec: JobSpec, *, is_sharded: bool = False) -> Job:
    """Build the job of a story; it may shard its model over the ranks itself."""
    dtype = _DTYPES[spec.dtype]

    def model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(spec.seed)
            made = Network(spec).to(dtype)
        if is_sharded:
            for block in made.blocks:
                if any(each.requires_grad for each in block.parameters()):
                    fully_shard(block)
            fully_shard(made)
        return made

    return Job(
        model=model,
        batch=lambda size: _batch(spec, 0, size),
        loss=_loss(spec),
        optimizer=_optimizer(spec),
        batch_size=spec.batch_size,
        clip_grad_norm=0.5 if spec.clips else None,
    )


def _batch(spec: JobSpec, number: int, size: int) -> Any:
    generator = torch.Generator().manual_seed(spec.seed * 1000 + number)
    dtype = _DTYPES[spec.dtype]
    inputs = torch.randn(size, NUM_ROWS, NUM_FEATURES, generator=generator, dtype=dtype)
    labels = torch.randint(0, NUM_CLASSES, (size,), generator=generator)
    return {"x": inputs, "y": labels} if spec.loader == "dict" else (inputs, labels)


def batches_from(spec: JobSpec, begin: int, end: int) -> Iterator[Any]:
    """Yield the batches of steps, as the story's loader gives them."""
    chance = random.Random(spec.seed)
    sizes = [chance.randint(spec.batch_size // 2, spec.batch_size) for _ in range(end)]
    if spec.loader == "shuffled":
        yield from _shuffled(spec, end)[begin:]
        return
    held: Any = None
    for number in range(begin, end):
        size = sizes[number] if spec.loader == "ragged" else spec.batch_size
        batch = _batch(spec, number, size)
        if spec.loader == "refilled" and held is not None:
            for mine, other in zip(held, batch, strict=True):
                mine.copy_(other)
            batch = held
        held = batch
        yield batch


def _shuffled(spec: JobSpec, num_batches: int) -> list[Any]:
    inputs, labels = _entries(_batch(spec, 0, spec.batch_size * num_batches))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, labels),
        batch_size=spec.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(spec.seed),
    )
    return [tuple(each) for each in loader]


def plan_of(story: Story, strategies: Sequence[Mapping[str, Any]]) -> Plan:
    """Build the plan of a story, with what the guard goes on with."""
    built = in_catalogue_order(
        [
            build_strategy(each["name"], {key: each[key] for key in each if key != "name"})
            for each in strategies
        ]
    )
    ranks = story.num_ranks if story.shares in ("ddp", "fsdp2") else None
    own = Plan(strategies=built, ranks=ranks)
    rungs = _RUNGS if story.ladder == "same" else 0
    return Plan(strategies=built, ranks=ranks, ladder=(own,) * rungs)


def goes_together(strategies: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether strategies can be combined at all."""
    names = [each["name"] for each in strategies]
    return len(set(names)) == len(names) and clash(names) is None


def usable_strategies(story: Story) -> tuple[Mapping[str, Any], ...]:
    """Return the strategies of a story that its job takes, found out by running two steps."""
    shared = ({"name": story.shares},) if story.shares in ("ddp", "fsdp2") else ()
    kept: tuple[Mapping[str, Any], ...] = shared
    for each in story.strategies:
        wanted = (*kept, each)
        if goes_together(wanted) and _is_taken(story, wanted):
            kept = wanted
    return kept


def _is_taken(story: Story, strategies: Sequence[Mapping[str, Any]]) -> bool:
    own = [each for each in strategies if each["name"] not in ("ddp", "fsdp2")]
    try:
        plan = Plan(strategies=in_catalogue_order(plan_of(story, own).strategies), ladder=())
        with memfit.start(job_of(story.job), plan) as run:
            for batch in batches_from(story.job, 0, 2):
                run.step(batch)
    except memfit.MemfitError:
        return False
    return True


def planned(story: Story, told: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the strategies that the planner finds for a share of the plain peak, and tell it."""
    job = job_of(story.job)
    plain_bytes = memfit.predict(job, device="cpu").peak_allocated_bytes
    budget_bytes = int(story.budget_fraction * plain_bytes)
    plan = memfit.plan(job, device="cpu", budget=budget_bytes)
    told.write_text(str(budget_bytes))
    return tuple(
        {"name": each.name, **{key: _plain(value) for key, value in each.settings().items()}}
        for each in plan.strategies
    )


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
