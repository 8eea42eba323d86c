"""Memory against time on a chain of blocks: memfit's plans beside torch's own remedies.

Run: python benchmarks/bench_planner_chain.py           (about 30 minutes on two idle cores)

A transformer of 16 blocks, width 256, 512 tokens, batch 4. Everything runs in one process on the
same model and optimizer: each round takes every variant in turn, so that all see the same machine
and the same addresses. The activation peak is what a step takes on top of what lives when it
begins, from the allocator's own events. Times are of a second step after a variant was set up, as
medians of the ratios to the two plain steps before and after it: a machine may change its speed
within a round. torch.compile's memory budgets are run with inductor, beside a compiled step
without.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from results_file import save_result
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import memfit
from memfit.observe.allocator_events import AllocatorWatch
from memfit.runtime.run import open_plain_session, unguarded_run
from memfit.session.batches import find_layout
from memfit.session.session import Session
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.units import MIB

_NUM_BLOCKS, _WIDTH, _NUM_TOKENS, _BATCH_SIZE, _NUM_HEADS = 16, 256, 512, 4, 4
_TARGETS = (0.65, 0.50, 0.15)
_NEAR = 0.85
"""A plan below a peer's peak, and above this share of it, stands beside it."""
_COMPILE_BUDGETS = (0.5, 0.2, 0.1)
_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
_ATTENTION = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.project_in = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.project_out = nn.Linear(_WIDTH, _WIDTH)
        self.mlp_norm = nn.LayerNorm(_WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply attention and MLP. Shape (batch, tokens, width)."""
        batch, tokens, width = x.shape
        parts = self.project_in(self.attention_norm(x))
        parts = parts.view(batch, tokens, 3, _NUM_HEADS, width // _NUM_HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.project_out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A chain of blocks and a linear head over the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(_NUM_BLOCKS))
        self.head = nn.Linear(_WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify. Shapes (batch, tokens, width) to (batch, 10)."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@dataclass(slots=True)
class Variant:
    """One way to run the step, and what was measured of it."""

    name: str
    opened: Callable[[], AbstractContextManager[Callable[[], None]]]
    """Sets it up around the session, and gives its step."""
    activation_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """To the plain steps beside it."""
    strategies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """What every plan is made for."""

    job: memfit.Job
    session: Session
    batch: Any
    fixed_bytes: int
    """What lives when a step begins."""


def build_job() -> memfit.Job:
    """Build the job."""
    return memfit.Job(
        model=Transformer,
        batch=lambda size: (
            torch.randn(size, _NUM_TOKENS, _WIDTH),
            torch.randint(0, 10, (size,)),
        ),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        batch_size=_BATCH_SIZE,
        name="16 blocks",
    )


def main() -> None:
    """Measure the peers, plan at their peaks and at the targets, and time all side by side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-rounds", type=int, default=7)
    parser.add_argument("--without-compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    job = build_job()
    session = open_plain_session(job, "cpu", find_layout(job))
    batch = job.batch(job.batch_size)
    peers = list(_peers(session, batch, with_compile=not args.without_compile))
    for peer in peers:
        measure_peak(peer)
    plain = peers[0]
    fixed_bytes = memfit.predict(job).peak_allocated_bytes - plain.activation_bytes
    setting = Setting(job, session, batch, fixed_bytes)
    variants = [*peers, *_plans(setting, peers)]
    time_in_turns(variants, args.num_rounds)
    save_result("planner_chain", _figures(variants, fixed_bytes, args.num_rounds))


def _peers(session: Session, batch: Any, *, with_compile: bool) -> Iterator[Variant]:
    """Yield the plain step, torch's checkpointing, and torch.compile with and without budgets."""
    yield Variant("plain", partial(_as_it_is, session, batch, session.model))
    whole = memfit.Plan(strategies=(ActivationCheckpointing(),))
    yield Variant("checkpoint every block", partial(_planned, session, batch, whole))
    for name, operators in (
        ("torch SAC, keep products and attention", _PRODUCTS + _ATTENTION),
        ("torch SAC, keep attention", _ATTENTION),
    ):
        yield Variant(name, partial(_selective, session, batch, operators))
    if not with_compile:
        return
    for budget in (1.0, *_COMPILE_BUDGETS):
        name = "torch.compile" if budget == 1.0 else f"torch.compile, memory budget {budget}"
        yield Variant(name, partial(_as_it_is, session, batch, _compiled(session.model, budget)))


def _plans(setting: Setting, peers: list[Variant]) -> Iterator[Variant]:
    """Plan for the targets, and for the peak of every peer that none of these plans is close to."""
    plain = peers[0]
    planned: list[Variant] = []
    for target in _TARGETS:
        name, activation_bytes = f"memfit at {target:.2f}", int(target * plain.activation_bytes)
        planned += _variant(setting, name, activation_bytes)
    for peer in peers[1:]:
        most_bytes = peer.activation_bytes
        is_near = any(_NEAR * most_bytes <= v.activation_bytes <= most_bytes for v in planned)
        if not is_near and most_bytes < plain.activation_bytes:
            planned += _variant(setting, f"memfit at the peak of: {peer.name}", most_bytes)
    yield from planned


def _variant(setting: Setting, name: str, activation_bytes: int) -> Iterator[Variant]:
    """Plan for one budget; nothing where no plan fits."""
    budget_bytes = setting.fixed_bytes + activation_bytes
    try:
        plan = memfit.plan(setting.job, budget=budget_bytes, measure=True)
    except memfit.MemfitError as error:
        print(f"{name}: {error}")
        return
    variant = Variant(name, partial(_planned, setting.session, setting.batch, plan))
    variant.strategies = plan.labels()
    measure_peak(variant)
    size = f"{variant.activation_bytes / MIB:.1f} MiB"
    print(f"{name}: {size}, {' + '.join(variant.strategies)}", flush=True)
    yield variant


def _plain_step(session: Session, batch: Any, model: nn.Module) -> None:
    session.job.loss(model, batch).backward()
    session.optimizer.step()
    session.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _as_it_is(session: Session, batch: Any, model: nn.Module) -> Iterator[Callable[[], None]]:
    yield partial(_plain_step, session, batch, model)


@contextmanager
def _planned(session: Session, batch: Any, plan: memfit.Plan) -> Iterator[Callable[[], None]]:
    run = unguarded_run(session, plan)
    try:
        yield lambda: run.step(batch)
    finally:
        run.close()


@contextmanager
def _selective(session: Session, batch: Any, operators: list[Any]) -> Iterator[Callable[[], None]]:
    contexts = partial(create_selective_checkpoint_contexts, operators)
    with _wrapped(session.model, contexts):
        yield partial(_plain_step, session, batch, session.model)


@contextmanager
def _wrapped(model: nn.Module, contexts: Callable[[], Any]) -> Iterator[None]:
    """Checkpoint every block as torch's documentation shows it."""
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    try:
        yield
    finally:
        for layer in model.layers:
            del layer.forward


def _compiled(model: nn.Module, budget: float) -> Callable[..., Any]:
    """Compile the model under a budget, which counts while its graphs are made."""

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return compile_fx(graph, inputs)

    # Dynamo keeps graphs by backend, so each budget needs one of its own.
    compiled = torch.compile(model, dynamic=False, backend=backend)

    def call(*args: Any) -> Any:
        with functorch_config.patch(activation_memory_budget=budget):
            return compiled(*args)

    return call


def measure_peak(variant: Variant) -> None:
    """Measure what one step takes on top of what lives when it begins."""
    with variant.opened() as step:
        step()
        with AllocatorWatch() as watch:
            step()
    current = highest = 0
    for event in watch.events():
        current += event.num_bytes
        highest = max(highest, current)
    variant.activation_bytes = highest


def time_in_turns(variants: list[Variant], num_rounds: int) -> None:
    """Time every variant in each round, the first of them before and after each of the others."""
    plain, others = variants[0], variants[1:]
    for number in range(num_rounds):
        _time_once(plain)
        for variant in others if number % 2 else others[::-1]:
            _time_once(variant)
            _time_once(plain)
            beside_seconds = sum(plain.seconds[-2:]) / 2
            variant.ratios.append(variant.seconds[-1] / beside_seconds)
        print(f"round {number + 1} of {num_rounds}: plain {plain.seconds[-1]:.2f} s", flush=True)
    plain.ratios = [1.0] * num_rounds


def _time_once(variant: Variant) -> None:
    """Time the second step after a variant was set up."""
    with variant.opened() as step:
        step()
        started = time.perf_counter()
        step()
        variant.seconds.append(time.perf_counter() - started)


def _figures(variants: list[Variant], fixed_bytes: int, num_rounds: int) -> dict[str, Any]:
    plain = variants[0]
    rows = []
    for variant in variants:
        quartiles = statistics.quantiles(variant.ratios, n=4)
        row = {
            "name": variant.name,
            "activation_bytes": variant.activation_bytes,
            "memory_ratio": round(variant.activation_bytes / plain.activation_bytes, 4),
            "time_ratio": round(statistics.median(variant.ratios), 4),
            "quartiles_of_time_ratio": [round(quartile, 4) for quartile in quartiles],
            "strategies": list(variant.strategies),
        }
        rows.append(row)
        print(f"{row['name']:64s} {row['memory_ratio']:.3f} x at {row['time_ratio']:.3f} x")
    return {
        "num_rounds": num_rounds,
        "plain_step_seconds": round(statistics.median(plain.seconds), 4),
        "fixed_bytes": fixed_bytes,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
