"""The engines that are tried by default, by name."""

from __future__ import annotations

from typing import Any

import memfit
from memfit.strategies import build_strategy
from memfit.strategies.base import Strategy

from .engines import Engine, PlanEngine, ZeroEngine

_PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"ddp": {}},
    "ddp, states on disk": {"ddp": {}, "optimizer-offload": {"to": "disk"}},
    "fsdp2": {"fsdp2": {}},
    "fsdp2, kept whole": {"fsdp2": {"shards_after_forward": 1}},
    "fsdp2, reduced once": {"fsdp2": {"reduces_once": True}},
    "fsdp2, offloaded": {"fsdp2": {"offloads": True}},
    "fsdp2, states on disk": {"fsdp2": {}, "optimizer-offload": {"to": "disk"}},
}
_ZERO: dict[str, dict[str, Any]] = {
    "zero 1": {"stage": 1},
    "zero 1, offloaded": {"stage": 1, "offload_optimizer": "cpu"},
    "zero 2": {"stage": 2},
    "zero 2, offloaded": {"stage": 2, "offload_optimizer": "cpu"},
    "zero 3": {"stage": 3},
    "zero 3, offloaded": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}
ENGINES = (*_PLANS, *_ZERO)


def engine_named(name: str, ranks: int, micro_batch_size: int) -> Engine:
    """Make an engine that cuts batches into pieces of a size; 0 leaves them whole."""
    if name in _ZERO:
        return ZeroEngine(_ZERO[name], micro_batch_size or None)
    chosen: list[Strategy] = [build_strategy(*each) for each in _PLANS[name].items()]
    if micro_batch_size:
        chosen.append(build_strategy("micro-batching", {"micro_batch_size": micro_batch_size}))
    return PlanEngine(memfit.Plan(strategies=tuple(chosen), ranks=ranks))
