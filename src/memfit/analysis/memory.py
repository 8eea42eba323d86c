"""Which memory an operator writes, and what that does to other views of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from memfit.analysis.dataflow import Call, Ref, Shape, refs_in
from memfit.analysis.flow import Flow, Kind, same_ratio
from memfit.analysis.use import (
    Use,
    argument_names,
    operator_name,
)
from memfit.trace.operators import written_arguments

_STATISTICS = ("running_mean", "running_var")


_SILENTLY_WRITTEN: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
     "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    _STATISTICS,
)  # fmt: skip
"""Arguments that operators write without saying so in their schemas."""


_TURNED_IN_PLACE = frozenset({"transpose_", "t_", "unsqueeze_", "squeeze_", "swapaxes_"})
"""Operators that give a tensor other dimensions and leave its memory alone."""


def written_to(flow: Flow, after: Flow) -> Flow:
    """Return what is known of a view after another view of its memory was written."""
    is_same = flow.value is not None and flow.value == after.value
    axis = next((axis for axis in after.axes if axis is not None), None)
    axes = flow.axes
    if axis is not None and not axis.wild:
        axes = tuple(axis if mine is not None and mine.wild else mine for mine in axes)
    return replace(
        flow,
        axes=axes,
        is_uniform=flow.is_uniform and after.is_uniform and is_same,
        is_positions=False,
        value=flow.value if is_same else None,
        is_drawn=flow.is_drawn or after.is_drawn,
        sources=None,
    )


def stays_like(before: Flow, after: Flow) -> bool:
    """Return whether what is written counts its samples as what was there."""
    if before.kind is not after.kind or not same_ratio(before.ratio, after.ratio):
        return False
    if before.axes == after.axes:
        return True
    return len(before.axes) == len(after.axes) and all(
        one is other
        or (one is not None and other is not None and not one.wild and one.matches(other))
        for one, other in zip(before.axes, after.axes, strict=True)
    )


def lies_like(one: Shape, other: Shape) -> bool:
    """Return whether two views have the same elements in the same order."""
    return (one.sizes, one.stride, one.offset) == (other.sizes, other.stride, other.offset)


def is_apart(one: Shape, other: Shape) -> bool:
    """Return whether two views of the same memory have no element in common, by where they end."""
    if one.dtype != other.dtype or not one.numel or not other.numel:
        return False
    return one.last < other.offset or other.last < one.offset


def is_compatible(flow: Flow, after: Flow) -> bool:
    """Test whether a view keeps what is known of it when another view of its memory is written."""
    if flow.kind is not after.kind or not same_ratio(flow.ratio, after.ratio):
        return False
    if flow.kind is not Kind.EACH:
        return True
    mine, its = [a for a in flow.axes if a], [a for a in after.axes if a]
    return len(mine) == len(its) == 1 and mine[0].matches(its[0])


def samples_lie_alike(views: tuple[Shape, Shape], flows: tuple[Flow, Flow]) -> bool:
    """Return whether the samples of one view of memory are those of another one, by where they lie.

    A wild dimension may be seen from any side, so that what is known of it says nothing of what
    is written there through another view.

    Args:
        views: what is looked at, and what is written.
        flows: what is known of both.
    """
    dims = [flow.batch_dim for flow in flows]
    if dims[0] is None or dims[1] is None:
        return dims[0] is dims[1]
    one, other = views
    extent, step = one.sizes[dims[0]], one.stride[dims[0]]
    if (extent, step) != (other.sizes[dims[1]], other.stride[dims[1]]) or not step:
        return False
    whole = extent * step
    apart = (other.offset - one.offset + whole // 2) % whole - whole // 2
    return (
        apart - _span(one, dims[0], whole) > -step and apart + _span(other, dims[1], whole) < step
    )


def _span(view: Shape, batch_dim: int, whole: int) -> int:
    """Return how far the elements of one sample lie apart, but for steps over all samples."""
    dims = enumerate(zip(view.sizes, view.stride, strict=True))
    return sum(
        (size - 1) * stride for dim, (size, stride) in dims if dim != batch_dim and stride % whole
    )


def written_refs(use: Use) -> list[Ref]:
    """List the tensors whose memory an operator writes, silently or not."""
    return writes_of(use.call, statistics=not use.gets_statistics)


def writes_of(call: Call, *, statistics: bool = True) -> list[Ref]:
    """List the tensors whose memory a call writes, silently or not.

    Args:
        call: of an operator.
        statistics: whether batch normalisation keeps its own.
    """
    name, places = operator_name(call.func), argument_names(call.func)
    if name in _TURNED_IN_PLACE:
        return []
    found = [call.arguments[place] for place in written_arguments(call.func)]
    silent = _SILENTLY_WRITTEN.get(name, ()) if statistics else ()
    if silent and ("training" not in places or call.arguments[places["training"]]):
        found += [call.arguments[places[each]] for each in silent]
    return list(refs_in(tuple(found)))
