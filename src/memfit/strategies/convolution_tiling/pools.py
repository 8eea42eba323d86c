"""Pools of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from memfit.strategies.convolution_tiling.capture import Call, Value
from memfit.strategies.convolution_tiling.slabs import (
    Local,
    Rows,
    Slab,
    arguments_of,
    each_dimension,
)
from memfit.strategies.convolution_tiling.windows import Windows

_MAX_POOLS = {"max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3}
_AVERAGES = {"avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3}


def _pool(
    given: Mapping[str, Any], values: Sequence[Value], dims: Mapping[int, int], rank: int
) -> tuple[dict[str, Any], Windows, int, int] | None:
    source = given["input"].index
    dim, shape = dims.get(source), values[source].shape
    if dim is None or len(shape) != rank + 2 or dim < 2 or given.get("ceil_mode"):
        return None
    kernel = each_dimension(given["kernel_size"], rank)
    stride = each_dimension(given.get("stride") or kernel, rank)
    padding, dilation = (
        each_dimension(given.get("padding", 0), rank),
        each_dimension(given.get("dilation", 1), rank),
    )
    at = dim - 2
    windows = Windows(
        kernel=kernel[at],
        stride=stride[at],
        before=padding[at],
        dilation=dilation[at],
        extent=shape[dim],
    )
    padding = [0 if place == at else each for place, each in enumerate(padding)]
    read = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return read, windows, source, dim


def max_pool(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow a maximum over windows."""
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    if call.kwargs.get("return_indices"):
        return None
    rank = _MAX_POOLS[call.name]
    found = _pool(arguments_of(call, names), values, dims, rank)
    if found is None:
        return None
    read, windows, source, dim = found
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]

    def run(slabs: Mapping[int, Slab], _others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        seen = windows.padded(slabs[source], dim, rows, float("-inf"))
        result: Tensor = function(
            seen, read["kernel"], read["stride"], read["padding"], read["dilation"]
        )
        return result

    return Local(needs=lambda rows: {source: windows.needs(rows)}, run=run, dim=dim)


def average_pool(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow a mean over windows without padding."""
    names = (
        "input",
        "kernel_size",
        "stride",
        "padding",
        "ceil_mode",
        "count_include_pad",
        "divisor_override",
    )
    rank = _AVERAGES[call.name]
    given = arguments_of(call, names)
    if given.get("divisor_override") is not None:
        return None
    found = _pool(given, values, dims, rank)
    if found is None or found[1].before or any(found[0]["padding"]):
        return None
    read, windows, source, dim = found

    def run(slabs: Mapping[int, Slab], _others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        seen = windows.padded(slabs[source], dim, rows)
        result: Tensor = call.function(seen, read["kernel"], read["stride"])
        return result

    return Local(needs=lambda rows: {source: windows.needs(rows)}, run=run, dim=dim)
