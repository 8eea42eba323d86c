"""Operators that put tensors behind one another, or on top of one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.analysis.flow import Axes, Axis, Flow, Kind, same_ratio, samples_along
from memfit.analysis.use import CoupledError, NotFollowedError, Use


def joined(use: Use) -> list[Flow]:
    """Put tensors behind one another, or on top of one another."""
    refs = use.tensors
    if use.name == "cat":  # an empty tensor of one dimension is left out, as torch does
        refs = [ref for ref in refs if use.size_of(ref) != (0,)] or refs
    flows = [use.flow_of(ref) for ref in refs]
    if any(flow.kind is Kind.SUM for flow in flows):
        return [_joined_sums(use, flows)]
    if not all(same_ratio(flow.ratio, flows[0].ratio) for flow in flows):
        raise CoupledError("joins values of which only one changes with the batch size")
    if any(flow.is_positions for flow in flows):
        raise CoupledError("uses the positions of samples in the batch")
    num_dims = len(use.result_size())
    dim = use.argument("dim") % num_dims
    rows = [list(flow.axes) for flow in flows]
    if use.name == "stack":
        for row in rows:
            row.insert(dim, None)
    return [
        samples_along(
            _joined_axes(rows, dim),
            *flows,
            ratio=flows[0].ratio,
            sources=_joined_sources(flows),
            has_holes=any(flow.has_holes or flow.is_uniform for flow in flows),
        )
    ]


def _joined_axes(rows: Sequence[Sequence[Axis | None]], dim: int) -> Axes:
    """Find the samples' dimension of joined tensors.

    Raises:
        CoupledError: if samples are joined with something that has none, or with other samples.
    """
    axes: list[Axis | None] = []
    for place in range(len(rows[0])):
        found = [row[place] for row in rows]
        known = [axis for axis in found if axis is not None]
        if not known:
            axes.append(None)
            continue
        if len(known) < len(found):
            raise CoupledError("puts samples beside something that has no samples")
        axes.append(_one_after_another(known) if place == dim else _common(known))
    if sum(axis is not None for axis in axes) > 1:
        raise CoupledError("compares samples of the batch with one another")
    return tuple(axes)


def _one_after_another(axes: Sequence[Axis]) -> Axis:
    inner = {axis.inner for axis in axes if not axis.wild or axis.outer * axis.inner == 1}
    if len(inner) == 1 and all(not axis.wild or axis.outer * axis.inner == 1 for axis in axes):
        return Axis(outer=sum(axis.outer for axis in axes), inner=next(iter(inner)))
    if all(axis.wild for axis in axes):  # each is the same all along, but not as the others are
        return Axis(outer=sum(axis.outer * axis.inner for axis in axes), inner=1)
    raise NotFollowedError("joins samples that are laid out in different ways")


def _common(axes: Sequence[Axis]) -> Axis:
    exact = next((axis for axis in axes if not axis.wild), axes[0])
    if not all(axis.matches(exact) for axis in axes):
        raise CoupledError("brings samples together with other samples of the batch")
    return exact


def _joined_sums(use: Use, flows: Sequence[Flow]) -> Flow:
    shrink = use.sizes.shrink
    if any(flow.kind is Kind.EACH for flow in flows):
        raise CoupledError("puts samples beside a sum over the batch")
    ratios = [f.ratio * (shrink if f.kind is Kind.FREE else 1.0) for f in flows]
    if not all(same_ratio(ratio, ratios[0]) for ratio in ratios):
        raise CoupledError("joins values of which only one changes with the batch size")
    total = next(flow for flow in flows if flow.kind is Kind.SUM)
    return replace(total, axes=(None,) * len(use.result_size()), value=None)


def _joined_sources(flows: Sequence[Flow]) -> frozenset[int] | None:
    """Say where the entries of joined labels come from; constants stand at fixed places."""
    found: frozenset[int] = frozenset()
    known = [flow.sources for flow in flows if flow.sources is not None]
    if len({bool(sources) for sources in known}) > 1:
        return None  # numbers of our own may be any that labels never are
    for flow in flows:
        if flow.sources is None and not flow.is_uniform:
            return None
        found |= flow.sources or frozenset()
    return found


RULES: Mapping[str, Any] = dict.fromkeys(("cat", "stack"), joined)
