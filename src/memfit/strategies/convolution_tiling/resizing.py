"""Resizing of rows by two taps for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.strategies.convolution_tiling.capture import Call, Value
from memfit.strategies.convolution_tiling.slabs import (
    Local,
    Rows,
    Slab,
    each_dimension,
    python_arguments_of,
)

_LINEAR_MODES = ("linear", "bilinear", "trilinear")
_DOUBLE_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taps:
    """For every row of the output its two rows of the input, and the second's weight."""

    lows: list[int]
    highs: list[int]
    weights: list[float] | None = None

    def needs(self, rows: Rows) -> Rows:
        part = slice(*rows)
        return min(self.lows[part]), max(self.highs[part]) + 1

    def resized(self, slab: Slab, dim: int, rows: Rows) -> Tensor:
        """Resize the dimension of the rows alone."""
        tensor, first = slab
        low, high = (
            tensor.index_select(
                dim, torch.tensor([each - first for each in taps], device=tensor.device)
            )
            for taps in (self.lows[slice(*rows)], self.highs[slice(*rows)])
        )
        if self.weights is None:
            return low
        weights = torch.tensor(self.weights[slice(*rows)], dtype=torch.float64)
        ends = [1] * (tensor.dim() - 1 - dim)
        return torch.lerp(low, high, weights.to(tensor).view(-1, *ends))


def interpolate(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow resizing by the nearest or by linear weights."""
    given = python_arguments_of(call)
    source, out = given["input"].index, values[call.outs[0]]
    dim, shape, mode = dims.get(source), values[source].shape, given["mode"]
    if dim is None or dim < 2 or given["antialias"]:
        return None
    if mode not in {"nearest", "nearest-exact", *_LINEAR_MODES}:
        return None
    factors = None
    if given["scale_factor"] is not None and not given["recompute_scale_factor"]:
        factors = each_dimension(given["scale_factor"], len(shape) - 2)
    factor = None if factors is None else factors[dim - 2]
    taps = _taps(
        shape[dim],
        out.shape[dim],
        factor,
        mode=mode,
        has_aligned_corners=bool(given["align_corners"]),
        is_double=values[source].element_bytes == _DOUBLE_BYTES,
    )

    def run(slabs: Mapping[int, Slab], _others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        along = taps.resized(slabs[source], dim, rows)
        sizes = list(out.shape[2:])
        sizes[dim - 2] = rows[1] - rows[0]
        if sizes == list(along.shape[2:]):
            return along
        aligned = {"mode": mode, "align_corners": given["align_corners"]}
        if factors is None:
            return F.interpolate(along, size=sizes, **aligned)
        scales = [1.0 if place == dim - 2 else each for place, each in enumerate(factors)]
        return F.interpolate(along, scale_factor=scales, **aligned)

    return Local(needs=lambda rows: {source: taps.needs(rows)}, run=run, dim=dim)


@lru_cache(maxsize=256)
def _taps(
    extent: int,
    out_extent: int,
    factor: float | None,
    *,
    mode: str,
    has_aligned_corners: bool,
    is_double: bool,
) -> _Taps:
    """Return where every row comes from.

    Source: torch's aten/src/ATen/native/UpSample.h, area_pixel_compute_source_index; it counts in
    double precision for tensors of double precision, and else in single precision.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if mode not in _LINEAR_MODES:
            numbers = torch.arange(extent, dtype=torch.float64).view(1, 1, -1)
            wanted = {"size": out_extent} if factor is None else {"scale_factor": factor}
            read = F.interpolate(numbers, mode=mode, **wanted)
            rows = [int(each) for each in read.flatten().tolist()]
            return _Taps(lows=rows, highs=rows)
        kind = torch.float64 if is_double else torch.float32
        places = torch.arange(out_extent, dtype=kind)
        if has_aligned_corners:
            scale = torch.tensor(max(extent - 1, 0), dtype=kind) / max(out_extent - 1, 1)
            where = places * scale
        else:
            scale = torch.tensor(extent, dtype=kind) / out_extent
            if factor is not None:
                scale = torch.tensor(1.0 / factor, dtype=kind)
            where = ((places + 0.5) * scale - 0.5).clamp_min(0.0)
        lows = where.floor().clamp_max(extent - 1)
        highs = (lows + 1).clamp_max(extent - 1)
        weights = (where - lows).tolist()
        return _Taps(lows=lows.long().tolist(), highs=highs.long().tolist(), weights=weights)
