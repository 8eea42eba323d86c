"""Asks the rules about an operator, and measures what one really takes on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from memfit.kernels.cpu import scratch_bytes
from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.operators import CUDA_OPERATORS
from memfit.kernels.registration import call_rule
from memfit.kernels.scratch import Scratch
from memfit.observe.allocator_events import AllocatorWatch

HAS_KNOWN_CONVOLUTIONS = torch.backends.cpu.get_cpu_capability() in {"AVX2", "AVX512"}
"""Whether the rules for oneDNN's convolutions were read off this processor's instruction set."""


def overload(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpOverload:
    """Find the overload of an operator of torch that takes these arguments."""
    found = torch._C._jit_resolve_packet(f"aten::{name}", *args, **kwargs)
    return getattr(getattr(torch.ops.aten, name), found or "default")


def cuda_scratch(
    name: str, *args: Any, card: Card, out: Any = None, **kwargs: Any
) -> Scratch | None:
    """Ask the rule of CUDA what an operator takes; there must be one."""
    func = overload(name, args, kwargs)
    rule = CUDA_OPERATORS.find(func).scratch
    found = call_rule(rule, func, args, kwargs, out=out, card=card)
    assert found is not NotImplemented
    return found


def cpu_scratch_bytes(name: str, *args: Any, out: Any = None, **kwargs: Any) -> int:
    """Ask the rule of the CPU what an operator takes."""
    return scratch_bytes(overload(name, args, kwargs), args, kwargs, out)


def taken_bytes(call: Callable[[], object]) -> int:
    """Return the most that a call holds beside what it returns."""
    call()
    with AllocatorWatch() as watch:
        results = call()
    tensors = [each for each in tree_leaves(results) if each is not None]
    kept = sum(each.numel() * each.element_size() for each in tensors)
    return watch.highest_growth_bytes() - kept
