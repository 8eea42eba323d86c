"""Attention and recurrent layers, in one operator each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import Axes, Axis, Flow, Kind, sum_over_batch
from memfit.analysis.rules.layers import NOT_PLAIN, check_same_samples, check_weights
from memfit.analysis.use import CoupledError, NotFollowedError, Use


def attended(use: Use) -> list[Flow]:
    """Attend within each sample."""
    query, key, value = (use.flow(name) for name in ("query", "key", "value"))
    if query is None or key is None or value is None:
        raise NotFollowedError("attends in another way than expected")
    flows = [query, key, value]
    for name in ("attn_mask", "attn_bias"):
        flow = use.flow(name) if use.has(name) else None
        flows += [flow] if flow is not None and any(flow.axes) else []
    _check_attention(flows)
    is_drawn = any(flow.is_drawn for flow in flows) or bool(use.argument("dropout_p"))
    return [_attended(use, result, query, is_drawn=is_drawn) for result in use.call.results]


def _check_attention(flows: Sequence[Flow]) -> None:
    for flow in flows:
        if flow.kind is Kind.SUM or not flow.is_plain:
            raise CoupledError(NOT_PLAIN)
        if flow.kind is not Kind.EACH or flow.batch_dim != 0:
            raise CoupledError("attends to other samples of the batch")
    check_same_samples(*flows)


def _attended(use: Use, result: Ref, like: Flow, *, is_drawn: bool) -> Flow:
    extents = use.size_of(result)
    varying = any(use.varying_axes(result))
    axes = (like.axes[0] if varying else None, *(None,) * (len(extents) - 1)) if extents else ()
    is_total = "backward" in use.name  # the gradient of a mask that all samples share
    kind = Kind.EACH if varying else (Kind.SUM if is_total else Kind.FREE)
    return Flow(kind=kind, axes=axes, is_drawn=is_drawn)


def attended_back(use: Use) -> list[Flow]:
    """Carry a gradient back through attention."""
    gradient, *others = use.flows
    tensors = [flow for flow in others if any(flow.axes)]
    if gradient.kind is not Kind.EACH or gradient.batch_dim != 0:
        raise CoupledError("attends to other samples of the batch")
    _check_attention(tensors)
    check_same_samples(gradient, *tensors)
    found = []
    for result in use.call.results:
        flow = _attended(use, result, gradient, is_drawn=gradient.is_drawn)
        found.append(replace(flow, ratio=gradient.ratio))
    return found


def _recurrent_axis(flow: Flow | None) -> Axis | None:
    """Return the samples' dimension of steps x samples x width, or of samples x width."""
    if flow is None:
        raise NotFollowedError("recurs in another way than expected")
    if flow.kind is Kind.SUM or flow.batch_dim not in (None, len(flow.axes) - 2):
        raise CoupledError("recurs over the samples")
    return None if flow.batch_dim is None else flow.axes[-2]


def recurred(use: Use) -> list[Flow]:
    """Run a recurrent layer over time, steps x samples x width."""
    inputs = use.flow("input")
    axis = _recurrent_axis(inputs)
    assert inputs is not None
    check_weights(use, "weight0", "weight1", "weight2", "weight3")
    if not inputs.is_plain:
        raise CoupledError(NOT_PLAIN)
    for name in ("hx_", "cx_"):
        if use.flow(name) is not None:
            _recurrent_axis(use.flow(name))
    found = [
        Flow(kind=Kind.EACH, axes=_before_width(axis, use.size_of(result)))
        for result in use.call.results
    ]
    return [replace(flow, is_drawn=inputs.is_drawn) for flow in (*found[:3], use.opaque(found[3]))]


def _before_width(axis: Axis | None, extents: Sequence[int]) -> Axes:
    """Put the samples in the dimension before the last."""
    axes: list[Axis | None] = [None] * len(extents)
    if len(extents) > 1:
        axes[-2] = axis
    return tuple(axes)


def recurred_back(use: Use) -> list[Flow]:
    """Carry gradients back through a recurrent layer."""
    gradients = [use.flow(name) for name in ("grad_output", "grad_hy", "grad_cy")]
    found = [flow for flow in gradients if flow is not None]
    axis = _recurrent_axis(use.flow("input"))
    ratios = {round(flow.ratio, 9) for flow in found if not flow.is_uniform or flow.value != 0.0}
    if len(ratios) > 1:
        raise CoupledError(NOT_PLAIN)
    ratio = next(iter(ratios), 1.0)
    results = []
    for result in use.call.results:
        extents = use.size_of(result)
        if any(use.varying_axes(result)):
            flow = Flow(kind=Kind.EACH, axes=_before_width(axis, extents), ratio=ratio)
        else:
            flow = sum_over_batch(len(extents), ratio)
        results.append(flow)
    return results


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


RULES: Mapping[str, Any] = {
    **dict.fromkeys(_ATTENTION, attended),
    **dict.fromkeys([f"{name}_backward" for name in _ATTENTION], attended_back),
    "mkldnn_rnn_layer": recurred,
    "mkldnn_rnn_layer_backward": recurred_back,
}
