"""Operators that work element by element, and what they do to sums over samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import (
    Axes,
    Axis,
    Flow,
    Kind,
    is_one,
    same_ratio,
    samples_along,
    sum_over_batch,
)
from memfit.analysis.use import CoupledError, NotFollowedError, Use

_DEGREES = {
    "abs": 1.0, "relu": 1.0, "leaky_relu": 1.0, "square": 2.0, "sqrt": 0.5, "rsqrt": -0.5,
    "reciprocal": -1.0, "sgn": 0.0, "sign": 0.0,
}  # fmt: skip
"""Functions with f(c x) = c^degree f(x) for positive c."""


def aligned(use: Use, refs: Sequence[Ref], num_dims: int) -> Axes:
    """Line tensors up by their last dimensions, as broadcasting does.

    Raises:
        CoupledError: if samples of one tensor meet other samples of another.
    """
    axes: list[Axis | None] = [None] * num_dims
    extents = [1] * num_dims
    for ref in refs:
        flow, size = use.flow_of(ref), use.size_of(ref)
        offset = num_dims - len(size)
        for dim, extent in enumerate(size):
            place = offset + dim
            axis = flow.axes[dim] if flow.axes else None
            _merge(axes, extents, place, (axis, extent))
    if sum(axis is not None for axis in axes) > 1:
        raise CoupledError("compares samples of the batch with one another")
    return tuple(axes)


def _merge(
    axes: list[Axis | None], extents: list[int], place: int, new: tuple[Axis | None, int]
) -> None:
    """Take one tensor's dimension into the result's."""
    axis, extent = new
    before = axes[place]
    if extents[place] == 1 and (extent > 1 or axis is not None) and before is None:
        axes[place], extents[place] = axis, extent
        return
    if extent == 1 and axis is None:
        return
    if (axis is None) != (before is None):
        raise CoupledError("combines samples with something that has no samples, by position")
    if axis is not None and before is not None:
        if not axis.matches(before):
            raise CoupledError("brings samples together with other samples of the batch")
        if before.wild:
            axes[place] = axis


def combined(use: Use, refs: Sequence[Ref], ratio: float) -> Flow:
    """Return the result of element by element work on tensors of which none is a sum.

    Raises:
        CoupledError: see ``aligned``.
    """
    flows = [use.flow_of(ref) for ref in refs]
    axes = aligned(use, refs, len(use.result_size()))
    if any(flow.is_positions for flow in flows) and any(axes):
        raise CoupledError("uses the positions of samples in the batch")
    is_uniform = all(flow.is_uniform or _is_number(flow) for flow in flows)
    return samples_along(axes, *flows, ratio=ratio, is_uniform=is_uniform)


def _is_number(flow: Flow) -> bool:
    """Return whether a tensor is a single value that does not depend on the batch."""
    return flow.kind is Kind.FREE and not flow.axes


def any_pointwise(use: Use) -> list[Flow]:
    """Let a function of elements work on values that are the same at every size."""
    check_numbers(use)
    for flow in use.flows:
        if flow.kind is Kind.SUM:
            raise CoupledError("applies a function to a sum over the batch")
        if not flow.is_plain:
            raise CoupledError("applies a function to values that depend on the batch size")
    return [combined(use, use.tensors, 1.0)] * len(use.call.results)


def gradient_of_pointwise(use: Use) -> list[Flow]:
    """Multiply a gradient, the first argument, by a function of the others."""
    first, *others = use.tensors
    gradient = use.flow_of(first)
    if all(use.flow_of(ref).is_plain for ref in others):
        if gradient.kind is Kind.SUM:
            found = times(use, gradient, [use.flow_of(ref) for ref in others])
            return [found] * len(use.call.results)
        if not any(use.flow_of(ref).kind is Kind.SUM for ref in others):
            return [combined(use, use.tensors, gradient.ratio)] * len(use.call.results)
    return any_pointwise(use)


def times(use: Use, factor: Flow, others: Sequence[Flow]) -> Flow:
    """Multiply a sum by what does not depend on the batch.

    Raises:
        CoupledError: if it does.
    """
    if any(flow.kind is not Kind.FREE for flow in others):
        raise CoupledError("multiplies a sum over the batch by something that depends on it")
    ratio = factor.ratio * prod(flow.ratio for flow in others)
    axes = (None,) * len(use.result_size())
    return replace(factor, axes=axes, ratio=ratio, is_uniform=False)


def added(use: Use) -> list[Flow]:
    """Add tensors, all of which must change alike with the size of the batch."""
    if use.name.startswith("lerp"):
        return any_pointwise(use)
    refs = [ref for ref in use.tensors if not use.flow_of(ref).is_zero] or use.tensors[:1]
    flows = [use.flow_of(ref) for ref in refs]
    if len(flows) == 1 and len(use.tensors) > 1:
        return [replace(_reshaped(use, flows[0], refs[0]), sources=None)]
    numbers = [value for value in _numbers(use) if value[2] not in {"alpha", "value", "weight"}]
    if any(first or second for first, second, _ in numbers):
        flows = [*flows, Flow(kind=Kind.FREE, ratio=_constant_ratio(numbers))]
    _check_factors(use)
    if any(flow.kind is Kind.SUM for flow in flows):
        return [sum_of(use, flows)]
    ratio = flows[0].ratio
    if not all(same_ratio(flow.ratio, ratio) for flow in flows):
        raise CoupledError("adds values of which only one changes with the batch size")
    return [combined(use, use.tensors, ratio)]


def sum_of(use: Use, flows: Sequence[Flow]) -> Flow:
    """Add sums over the batch, and what does not depend on it.

    Raises:
        CoupledError: if samples are added to a sum over them, or the terms change differently.
    """
    if any(flow.kind is Kind.EACH for flow in flows):
        raise CoupledError("combines each sample with a sum over the batch")
    shrink = use.sizes.shrink
    ratios = [flow.ratio * (shrink if flow.kind is Kind.FREE else 1.0) for flow in flows]
    if not all(same_ratio(ratio, ratios[0]) for ratio in ratios):
        raise CoupledError(
            "adds terms that change differently with the batch size, such as a sum over the "
            "batch and a term that belongs to no sample"
        )
    return sum_over_batch(len(use.result_size()), ratios[0], *flows)


def multiplied(use: Use) -> list[Flow]:
    """Multiply tensors and numbers."""
    refs = use.tensors
    if any(flow.is_positions for flow in use.flows):
        return [_further_apart(use)]
    flows = [use.flow_of(ref) for ref in refs]
    ratio = 1.0
    for first, second, _ in _numbers(use):
        ratio *= _ratio_of(first, second)
    for flow in flows:
        ratio *= flow.ratio
    sums = [flow for flow in flows if flow.kind is Kind.SUM]
    if len(sums) > 1:
        raise CoupledError("multiplies sums over the batch")
    if sums:
        others = [flow for flow in flows if flow is not sums[0]]
        return [replace(times(use, sums[0], others), ratio=ratio)]
    return [combined(use, refs, ratio)]


def _further_apart(use: Use) -> Flow:
    """Multiply the numbers of samples by the length of a sample's part: where each begins.

    Raises:
        CoupledError: if it is no such number.
    """
    step, other = use.arguments("other")
    if type(step) is not int or step != other or step < 1:
        raise CoupledError("uses the positions of samples in the batch")
    flow = use.flows[0]
    return replace(flow, stride=flow.stride * step)


def divided(use: Use) -> list[Flow]:
    """Divide a tensor by another one or by a number."""
    if use.argument("rounding_mode") is not None:
        return any_pointwise(use)
    top, bottom = use.argument("self"), use.argument("other")
    above = use.flow_of(top)
    if not isinstance(bottom, Ref):
        first, second = use.arguments("other")
        below = Flow(kind=Kind.FREE, ratio=_ratio_of(first, second))
    else:
        below = use.flow_of(bottom)
    if below.kind is Kind.SUM:
        raise CoupledError(
            "divides by a sum over the batch; return memfit.Total(sum, count), which "
            "micro-batches weight by their true counts"
            if above.kind is Kind.SUM
            else "divides by a sum over the batch"
        )
    ratio = above.ratio / below.ratio
    if above.kind is Kind.SUM:
        inverse = replace(below, ratio=1.0)
        return [replace(times(use, above, [inverse]), ratio=ratio)]
    return [combined(use, use.tensors, ratio)]


def raised(use: Use) -> list[Flow]:
    """Raise to a power, or apply another function that only scales with its argument."""
    (ref, *others) = use.tensors
    flow = use.flow_of(ref)
    if flow.kind is Kind.SUM or others:
        return any_pointwise(use)
    name = use.name.removesuffix("_")
    degree = use.argument("exponent") if name == "pow" else _DEGREES[name]
    if not isinstance(degree, (int, float)) or flow.ratio <= 0:
        return any_pointwise(use)
    check_numbers(use)
    return [combined(use, [ref], float(flow.ratio) ** float(degree))]


def kept(use: Use) -> list[Flow]:
    """Copy a tensor, perhaps into another type."""
    ref = use.tensors[0]
    flow = _reshaped(use, use.flow_of(ref), ref)
    name = use.name.removesuffix("_")
    if name == "view_as_real":
        return [replace(flow, axes=(*flow.axes[1:], None), value=None)]
    if name == "view_as_complex":
        return [replace(use.flow_of(ref), axes=use.flow_of(ref).axes[:-1], value=None)]
    if name not in {"clone", "_to_copy", "contiguous", "positive"}:
        flow = replace(flow, sources=None, is_uniform=flow.is_uniform and not flow.has_holes)
    return [replace(flow, value=None)]


def _reshaped(use: Use, flow: Flow, ref: Ref) -> Flow:
    """Broadcast what is known of one operand to the result's shape."""
    num_dims = len(use.result_size())
    if len(use.size_of(ref)) == num_dims:
        return flow
    axes = (None,) * (num_dims - len(flow.axes)) + flow.axes
    return replace(flow, axes=axes)


def _numbers(use: Use) -> list[tuple[Any, Any, str]]:
    """List the numbers that an operator is given, at both sizes, with their names."""
    found = []
    arguments = use.call.func._schema.arguments
    pairs = zip(use.call.arguments, use.other.arguments, arguments, strict=True)
    for first, second, argument in pairs:
        if isinstance(first, (int, float)) and not isinstance(first, bool):
            found.append((first, second, argument.name))
    return found


def _ratio_of(first: float, second: float) -> float:
    """Return how a factor changes with the batch size.

    Raises:
        CoupledError: if it is zero at one size alone.
    """
    if first == second:
        return 1.0
    if not first or not second:
        raise CoupledError("is given a number that depends on the batch size")
    return second / first


def _constant_ratio(numbers: Sequence[tuple[Any, Any, str]]) -> float:
    ratios = [_ratio_of(first, second) for first, second, _ in numbers]
    if any(not same_ratio(ratio, ratios[0]) for ratio in ratios):
        raise NotFollowedError("is given numbers that depend on the batch size")
    return ratios[0]


def _check_factors(use: Use) -> None:
    """Refuse weights of a sum that change with the batch size."""
    for first, second, name in _numbers(use):
        if name in {"alpha", "value", "weight"} and not is_one(_ratio_of(first, second)):
            raise CoupledError("weights its terms by a number that depends on the batch size")


def check_numbers(use: Use) -> None:
    """Refuse numbers that change with the batch size."""
    if any(first != second for first, second, _ in _numbers(use)):
        raise CoupledError("is given a number that depends on the batch size")


def _added_products(use: Use) -> list[Flow]:
    """Add a product or a quotient of two tensors to a third."""
    base, first, second = [use.flow_of(ref) for ref in use.tensors]
    if any(not flow.is_plain or flow.kind is Kind.SUM for flow in (base, first, second)):
        raise CoupledError("combines sums over the batch")
    check_numbers(use)
    return [combined(use, use.tensors, 1.0)]


RULES: Mapping[str, Any] = {
    **dict.fromkeys(("add", "sub", "rsub", "lerp", "subtract"), added),
    **dict.fromkeys(("mul", "multiply"), multiplied),
    **dict.fromkeys(("div", "true_divide"), divided),
    **dict.fromkeys(("pow", *_DEGREES), raised),
    **dict.fromkeys(("neg", "clone", "_to_copy", "positive", "contiguous", "_conj",
                     "_conj_physical", "real", "imag", "view_as_real", "view_as_complex"),
                    kept),
    **dict.fromkeys(("addcmul", "addcdiv"), _added_products),
    **dict.fromkeys(
        ("threshold_backward", "gelu_backward", "tanh_backward", "sigmoid_backward",
         "silu_backward", "elu_backward", "leaky_relu_backward", "hardtanh_backward",
         "hardswish_backward", "hardsigmoid_backward", "softplus_backward", "mish_backward",
         "log_sigmoid_backward", "softshrink_backward", "hardshrink_backward",
         "native_dropout_backward", "_prelu_kernel_backward"),
        gradient_of_pointwise,
    ),
}  # fmt: skip
"""Rules by the operator's name, which in-place operators share."""
