"""Norms over all positions of a sample, by the statistics of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from memfit.strategies.convolution_tiling.capture import Call, Ref, Value
from memfit.strategies.convolution_tiling.slabs import Local, Rows, Slab, cut, python_arguments_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm over groups of channels and all positions of a sample."""

    source: int
    weight: int | None
    bias: int | None
    num_groups: int
    eps: float


def norm_of(call: Call, values: Sequence[Value]) -> Norm | None:
    """Read a norm off its call; None where it uses running statistics."""
    if call.name not in {"group_norm", "instance_norm"}:
        return None
    given = python_arguments_of(call)
    weight, bias = given.get("weight"), given.get("bias")
    if given.get("running_mean") is not None or not given.get("use_input_stats", True):
        return None
    source = given["input"].index
    return Norm(
        source=source,
        weight=weight.index if isinstance(weight, Ref) else None,
        bias=bias.index if isinstance(bias, Ref) else None,
        num_groups=given.get("num_groups", values[source].shape[1]),
        eps=given["eps"],
    )


def norm(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow a norm over all positions of a sample."""
    found = norm_of(call, values)
    if found is None or dims.get(found.source, 0) < 2:
        return None
    dim, source = dims[found.source], found.source
    out = call.outs[0]

    def run(slabs: Mapping[int, Slab], others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        seen = cut(slabs[source], dim, rows)
        # By the norm's own index come scale and shift of each sample and channel.
        scale, shift = others[out]
        return torch.addcmul(shift.to(seen.dtype), seen, scale.to(seen.dtype))

    return Local(needs=lambda rows: {source: rows}, run=run, dim=dim, statistics_of=source)
