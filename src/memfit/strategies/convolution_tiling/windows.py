"""Convolutions and transposed convolutions of rows, with the rows beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from memfit.strategies.convolution_tiling.capture import Call, Ref, Value
from memfit.strategies.convolution_tiling.slabs import (
    Local,
    Rows,
    Slab,
    arguments_of,
    cut,
    each_dimension,
)

_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_TRANSPOSED = {"conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows that slide over rows: of a convolution or of a pool."""

    kernel: int
    stride: int
    before: int
    """Rows of padding ahead of the first."""
    dilation: int
    extent: int

    def span(self, rows: Rows) -> Rows:
        """Return the rows that are seen, those in the padding too."""
        first = rows[0] * self.stride - self.before
        last = (rows[1] - 1) * self.stride - self.before + self.dilation * (self.kernel - 1)
        return first, last + 1

    def needs(self, rows: Rows) -> Rows:
        """Return the rows that are there."""
        first, last = self.span(rows)
        start = min(max(first, 0), self.extent - 1)
        return start, max(min(last, self.extent), start + 1)

    def padded(self, slab: Slab, dim: int, rows: Rows, value: float = 0.0) -> Tensor:
        """Return what the windows see, with the padding in place."""
        first, last = self.span(rows)
        inner = (max(first, 0), min(last, self.extent))
        tensor, start = slab
        seen = tensor.narrow(dim, max(inner[0] - start, 0), max(inner[1] - inner[0], 0))
        ahead = min(max(-first, 0), last - first)
        behind = (last - first) - ahead - seen.shape[dim]
        if not ahead and not behind:
            return seen
        pads = [0, 0] * (tensor.dim() - 1 - dim) + [ahead, behind]
        return F.pad(seen, pads, value=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution, with what its backward needs."""

    source: int
    weight: int
    bias: int | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    windows: Windows
    dim: int


def convolution_of(
    call: Call, values: Sequence[Value], dims: Mapping[int, int]
) -> Convolution | None:
    """Read a convolution off its call; None where its rows are not followed."""
    rank = _CONVOLUTIONS.get(call.name)
    if rank is None:
        return None
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = arguments_of(call, names)
    source, weight = given["input"].index, given["weight"].index
    dim, shape = dims.get(source), values[source].shape
    if dim is None or len(shape) != rank + 2 or dim < 2:
        return None
    kernel = values[weight].shape[2:]
    stride, dilation = (
        each_dimension(given.get("stride", 1), rank),
        each_dimension(given.get("dilation", 1), rank),
    )
    reach = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    padding = given.get("padding", 0)
    if padding == "same" and any(each % 2 for each in reach):
        return None
    if isinstance(padding, str):
        padding = [each // 2 if padding == "same" else 0 for each in reach]
    padding = each_dimension(padding, rank)
    at = dim - 2
    bias = given.get("bias")
    return Convolution(
        source=source,
        weight=weight,
        bias=bias.index if isinstance(bias, Ref) else None,
        stride=stride,
        padding=[0 if place == at else each for place, each in enumerate(padding)],
        dilation=dilation,
        groups=given.get("groups", 1),
        windows=Windows(
            kernel=kernel[at],
            stride=stride[at],
            before=padding[at],
            dilation=dilation[at],
            extent=shape[dim],
        ),
        dim=dim,
    )


def convolution(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow a convolution."""
    found = convolution_of(call, values, dims)
    if found is None:
        return None

    def run(slabs: Mapping[int, Slab], others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        seen = found.windows.padded(slabs[found.source], found.dim, rows)
        bias = None if found.bias is None else others[found.bias]
        result: Tensor = call.function(
            seen,
            others[found.weight],
            bias,
            found.stride,
            found.padding,
            found.dilation,
            found.groups,
        )
        return result

    return Local(
        needs=lambda rows: {found.source: found.windows.needs(rows)}, run=run, dim=found.dim
    )


def transposed(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow a transposed convolution."""
    rank = _TRANSPOSED[call.name]
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    given = arguments_of(call, names)
    source, weight = given["input"].index, given["weight"].index
    dim, shape = dims.get(source), values[source].shape
    if dim is None or len(shape) != rank + 2 or dim < 2:
        return None
    at = dim - 2
    stride, padding, extra, dilation = (
        each_dimension(given.get(name, usual), rank)
        for name, usual in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))
    )
    step, ahead, reach = stride[at], padding[at], dilation[at] * (values[weight].shape[2 + at] - 1)
    if extra[at] > reach + 1 or ahead > reach:
        return None
    extent = shape[dim]
    padding = [0 if place == at else each for place, each in enumerate(padding)]
    extra = [0 if place == at else each for place, each in enumerate(extra)]
    bias = given.get("bias")

    def needs(rows: Rows) -> Mapping[int, Rows]:
        first = max(-(-(rows[0] + ahead - reach) // step), 0)
        last = min((rows[1] - 1 + ahead) // step, extent - 1)
        first = min(first, extent - 1)
        return {source: (first, max(last, first) + 1)}

    def run(slabs: Mapping[int, Slab], others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        wanted = needs(rows)[source]
        out = call.function(
            cut(slabs[source], dim, wanted),
            others[weight],
            None,
            stride,
            padding,
            extra,
            given.get("groups", 1),
            dilation,
        )
        start = rows[0] - (wanted[0] * step - ahead)
        missing = start + (rows[1] - rows[0]) - out.shape[dim]
        if missing > 0:
            out = F.pad(out, [0, 0] * (out.dim() - 1 - dim) + [0, missing])
        out = out.narrow(dim, start, rows[1] - rows[0])
        if isinstance(bias, Ref):
            out = out + others[bias.index].to(out.dtype).view(-1, *[1] * rank)
        result: Tensor = out
        return result

    return Local(needs=needs, run=run, dim=dim)
