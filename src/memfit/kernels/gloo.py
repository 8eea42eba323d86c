"""What gloo's collectives take of torch's memory on the CPU besides their tensors.

An all-gather receives into a flat copy of all outputs, and a reduce-scatter reduces a copy of its
whole input; both go when the collective is done. Reductions, broadcasts and exchanges of all with
all work in place. What the gloo library itself takes is not of torch's allocator.

Source: the allocator's events of each collective between 2 ranks, torch 2.13.0+cpu, 2026-11-23;
``allgather`` and ``reduce_scatter_tensor_coalesced`` in torch/csrc/distributed/c10d/
ProcessGroupGloo.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from memfit.kernels.tensor_bytes import num_bytes

GLOO_SOURCE = __name__
_Rule = Callable[[tuple[Any, ...]], int]


def staging_bytes(func: OpOverload, args: tuple[Any, ...]) -> int:
    """Return the bytes that a collective takes until it is done; 0 for all other operators."""
    rule = _RULES.get(str(func).rpartition(".")[0])
    return 0 if rule is None else rule(args)


def _first(args: tuple[Any, ...]) -> int:
    return sum(num_bytes(tensor) for tensor in _tensors(args[0]))


def _second(args: tuple[Any, ...]) -> int:
    return sum(num_bytes(tensor) for tensor in _tensors(args[1]))


def _first_from_all(args: tuple[Any, ...]) -> int:
    """Return the bytes of a functional all-gather's output, given its input and the ranks."""
    return _first(args) * int(args[1])


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)


_RULES: Mapping[str, _Rule] = {
    "c10d._allgather_base_": _first,
    "c10d.allgather_": _first,
    "c10d.allgather_into_tensor_coalesced_": _first,
    "c10d._reduce_scatter_base_": _second,
    "c10d.reduce_scatter_": _second,
    "c10d.reduce_scatter_tensor_coalesced_": _second,
    "_c10d_functional.all_gather_into_tensor": _first_from_all,
    "_c10d_functional.reduce_scatter_tensor": _first,
}
"""By name of the operator: the output of an all-gather, the input of a reduce-scatter."""
