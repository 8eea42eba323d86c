"""Operators that copy, compare, and choose elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import Axis, Flow, Kind, same_ratio, sum_over_batch
from memfit.analysis.rules.pointwise import any_pointwise, check_numbers, combined
from memfit.analysis.use import CoupledError, Use


def copied(use: Use) -> list[Flow]:
    """Write one tensor over another, broadcast to its shape."""
    source = use.argument("src")
    flow = use.flow_of(source)
    axes: list[Axis | None] = [None] * len(use.result_size())
    offset = len(axes) - len(use.size_of(source))
    for dim, axis in enumerate(flow.axes):
        axes[offset + dim] = axis
    target = use.varying_axes(use.call.results[0])
    if flow.kind is Kind.SUM and any(target):
        raise CoupledError("gives a sum over the batch to each sample")
    for dim, axis in enumerate(target):
        if axes[dim] is None and axis is not None:
            axes[dim] = axis
    if flow.kind is Kind.SUM:
        return [replace(flow, axes=tuple(axes), is_positions=False)]
    return [replace(flow.with_axes(tuple(axes)), sources=flow.sources, is_uniform=flow.is_uniform)]


def chosen(use: Use) -> list[Flow]:
    """Choose between two tensors by a condition."""
    condition, *values = [use.flow_of(ref) for ref in use.tensors]
    if condition.kind is Kind.SUM or any(flow.kind is Kind.SUM for flow in values):
        return [_masked_sum(use, condition, values)]
    return _chosen(use, condition, values)


def masked(use: Use) -> list[Flow]:
    """Fill in a number where a mask says so."""
    values, mask = use.argument("self"), use.argument("mask")
    given = use.argument("value")
    flows = [use.flow_of(values)]
    if isinstance(given, Ref):
        flows.append(use.flow_of(given))
    elif given != 0:
        flows.append(Flow(kind=Kind.FREE))
        check_numbers(use)
    mask_flow = use.flow_of(mask)
    if Kind.SUM in (mask_flow.kind, *(flow.kind for flow in flows)):
        return [_masked_sum(use, mask_flow, flows)]
    return _chosen(use, use.flow_of(mask), flows)


def _masked_sum(use: Use, condition: Flow, values: Sequence[Flow]) -> Flow:
    """Put zeros into a sum over the batch at fixed places.

    Raises:
        CoupledError: if the places depend on the batch, or it is no zeros that are put there.
    """
    given = [flow for flow in values if not flow.is_zero]
    if condition.kind is not Kind.FREE or not condition.is_plain or len(given) != 1:
        raise CoupledError("chooses by, or among, sums over the batch")
    return sum_over_batch(len(use.result_size()), given[0].ratio, given[0])


def _chosen(use: Use, condition: Flow, values: Sequence[Flow]) -> list[Flow]:
    if not condition.is_plain:
        raise CoupledError("chooses by values that depend on the batch size")
    values = [flow for flow in values if not flow.is_zero] or values
    ratio = values[0].ratio
    if not all(same_ratio(flow.ratio, ratio) for flow in values):
        raise CoupledError("chooses among values of which only one changes with the batch size")
    return [replace(combined(use, use.tensors, ratio), is_uniform=False)]


def compared(use: Use) -> list[Flow]:
    """Compare with a number. A label that is never ignored never equals the ignored one."""
    found = any_pointwise(use)[0]
    ref, *others = use.tensors
    other = use.argument("other")
    is_asked = use.given.all_labels_count and not others
    if not is_asked or not isinstance(other, (int, float)) or other >= 0:
        return [found]
    sources = use.flow_of(ref).sources
    if sources is None:
        return [found]
    use.rely_on(sources, int(other))
    return [replace(found, is_uniform=not use.flow_of(ref).has_holes)]


RULES: Mapping[str, Any] = {
    "copy": copied,
    "where": chosen,
    "masked_fill": masked,
    **dict.fromkeys(("eq", "ne"), compared),
}
