"""Memory against time on a chain of blocks: memfit's plans beside torch's own remedies.

Run: python benchmarks/bench_planner_chain.py           (about 40 minutes on two idle cores)
     PYTORCH_ALLOC_CONF=expandable_segments:True python benchmarks/bench_planner_chain.py \
         --device cuda                                          (seven minutes on a card)

A transformer of 16 blocks: width 256, 512 tokens and batch 4 in float32 on the processor; width
1024, 1024 tokens and batch 16 in bfloat16 on a card. Everything runs in one process on the same
model and optimizer: each round takes every variant in turn, so that all see the same machine and
the same addresses. The activation peak is what a step takes on top of what lives when it begins, by
the allocator. Times are of the third step of a variant that was set up, on a card of the fifth to
the seventh, as medians of the ratios to the two plain ones before and after it: a machine may
change its speed within a round. In the first, second, fourth, eighth and so on checkpoints of
memfit's look at every operator. torch.compile's memory budgets are run with inductor, beside a
compiled step without.
Budgets of memfit's plans are made from the peers' peaks; on a card they bound the whole process, so
what the allocator reserves besides is counted against memfit alone.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from chain_job import SIZES, Sizes, build_job
from results_file import save_result
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import memfit
from memfit.devices.catalogue import current_device_name
from memfit.observe.allocator_events import AllocatorWatch
from memfit.runtime.run import open_plain_session, unguarded_run
from memfit.session.batches import find_layout
from memfit.session.session import Session
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.units import MIB

_TARGETS = (0.65, 0.50, 0.15)
_CONF = "expandable_segments:True"
"""Of the allocator on a card; plans ask for it, and it cannot change beside other variants."""
_PLANNING_SHARE = 0.75
"""Of the time that there is, after which no further plan is begun."""
_MOST_PLANNING_SECONDS = 30
"""For one plan, where the time is bounded."""
_NEAR = 0.85
"""A plan below a peer's peak, and above this share of it, stands beside it."""
_COMPILE_BUDGETS = (0.5, 0.2, 0.1)
_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


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
    device: str
    """Its name in the catalogue."""
    session: Session
    batch: Any
    fixed_bytes: int
    """What a budget holds besides activations."""
    until: float
    """When no further plan is begun."""


def main() -> None:
    """Measure the peers, plan at their peaks and at the targets, and time all side by side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--num-rounds", type=int, default=7)
    parser.add_argument("--without-compile", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for everything")
    args = parser.parse_args()
    if args.device == "cuda" and os.environ.get("PYTORCH_ALLOC_CONF") != _CONF:
        parser.error(f"every variant is to have the same allocator: set PYTORCH_ALLOC_CONF={_CONF}")
    began = time.monotonic()
    torch.manual_seed(0)
    sizes, is_card = SIZES[args.device], args.device == "cuda"
    job, device = build_job(sizes), current_device_name() if is_card else "cpu"
    session = open_plain_session(job, args.device, find_layout(job))
    batch = [each.to(args.device) for each in job.batch(job.batch_size)]
    peers = list(_peers(session, batch, with_compile=not args.without_compile))
    peers = [peer for peer in peers if _could_be_run(peer)]
    plain, prediction = peers[0], memfit.predict(job, device)
    whole_bytes = prediction.process_bytes if is_card else prediction.peak_allocated_bytes
    fixed_bytes = whole_bytes - plain.activation_bytes
    until = began + args.seconds * _PLANNING_SHARE
    setting = Setting(job, device, session, batch, fixed_bytes, until)
    variants = [*peers, *_plans(setting, peers)]
    time_in_turns(variants, sizes, args.num_rounds, began + args.seconds)
    figures = {"device": device, **_figures(variants, setting.fixed_bytes)}
    save_result("planner_chain_card" if is_card else "planner_chain", figures)


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
    """Plan for one budget; nothing where no plan fits, or the time is over."""
    if time.monotonic() > setting.until:
        print(f"{name}: the time is over")
        return
    budget_bytes = setting.fixed_bytes + activation_bytes
    seconds = None if setting.until == math.inf else _MOST_PLANNING_SECONDS
    try:
        plan = memfit.plan(setting.job, setting.device, budget_bytes, measure=True, seconds=seconds)
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
        if torch.cuda.is_available():
            variant.activation_bytes = _peak_on_card(step)
            return
        with AllocatorWatch() as watch:
            step()
    current = highest = 0
    for event in watch.events():
        current += event.num_bytes
        highest = max(highest, current)
    variant.activation_bytes = highest


def _could_be_run(variant: Variant) -> bool:
    try:
        measure_peak(variant)
    except Exception as error:  # noqa: BLE001 - a machine may have no compiler
        print(f"{variant.name}: {type(error).__name__}: {str(error)[:300]}")
        return False
    print(f"{variant.name}: {variant.activation_bytes / MIB:.1f} MiB", flush=True)
    return True


def _peak_on_card(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    begin_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - begin_bytes


def time_in_turns(
    variants: list[Variant], sizes: Sizes, num_rounds: int, until: float = math.inf
) -> None:
    """Time every variant in each round, the first of them before and after each of the others."""
    plain, others = variants[0], variants[1:]
    for number in range(num_rounds):
        started = time.monotonic()
        _time_once(plain, sizes)
        for variant in others if number % 2 else others[::-1]:
            _time_once(variant, sizes)
            _time_once(plain, sizes)
            beside_seconds = sum(plain.seconds[-2:]) / 2
            variant.ratios.append(variant.seconds[-1] / beside_seconds)
        print(f"round {number + 1} of {num_rounds}: plain {plain.seconds[-1]:.3f} s", flush=True)
        plain.ratios.append(1.0)
        if 2 * time.monotonic() - started > until:
            break


def _time_once(variant: Variant, sizes: Sizes) -> None:
    """Time the steps after the first ones that follow when a variant was set up."""
    with variant.opened() as step:
        for _ in range(sizes.num_first):
            step()
        _wait()
        started = time.perf_counter()
        for _ in range(sizes.num_timed):
            step()
        _wait()
        variant.seconds.append((time.perf_counter() - started) / sizes.num_timed)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _figures(variants: list[Variant], fixed_bytes: int) -> dict[str, Any]:
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
        "num_rounds": len(plain.ratios),
        "plain_step_seconds": round(statistics.median(plain.seconds), 4),
        "fixed_bytes": fixed_bytes,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
