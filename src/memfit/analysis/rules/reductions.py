"""Operators that work along dimensions: sums, which may run over samples, and all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import Axis, Flow, Kind
from memfit.analysis.use import CoupledError, NotFollowedError, Use

_INDICES = frozenset({"argmax", "argmin", "argsort"})
_WITH_INDICES = frozenset({"max", "min", "sort", "topk", "kthvalue", "median", "nanmedian", "mode",
                           "cummax", "cummin"})  # fmt: skip
_COUNTING = frozenset({"cumsum", "cumprod", "logcumsumexp", "cumulative_trapezoid"})
"""Of equal numbers these give others, by their places."""
_LIKE_ONE = frozenset({"amax", "amin", "any", "all"})
"""Of equal numbers these give the number, however many there are."""
_TAKES_ALL = "works on the whole batch at once"


def _dims(use: Use, num_dims: int) -> tuple[int, ...]:
    """Return the dimensions that an operator works along; all of them if it names none."""
    given = use.argument("dim") if use.has("dim") else None
    if given is None or given == ():
        return tuple(range(num_dims))
    dims = given if isinstance(given, tuple) else (given,)
    return tuple(dim % max(1, num_dims) for dim in dims)


def _reduced(use: Use, flow: Flow, dims: Sequence[int]) -> tuple[Axis | None, ...]:
    """Drop reduced dimensions, or keep them with one element."""
    if use.argument("keepdim"):
        return tuple(None if dim in dims else axis for dim, axis in enumerate(flow.axes))
    return tuple(axis for dim, axis in enumerate(flow.axes) if dim not in dims)


def summed(use: Use) -> list[Flow]:
    """Add up along dimensions; over the samples this gives a sum over the batch."""
    ref = use.tensors[0]
    flow = use.flow_of(ref)
    if use.name in {"count_nonzero", "nansum"} and (flow.kind is Kind.SUM or not flow.is_plain):
        raise CoupledError("applies a function to values that depend on the whole batch")
    dims = _dims(use, len(flow.axes))
    if use.has("dim"):
        _check_same_dims(use, ref)
    axes = _reduced(use, flow, dims)
    found = replace(flow, axes=axes, is_positions=False, sources=None, has_holes=False, value=None)
    dim = flow.batch_dim
    if dim is None or dim not in dims:
        return [found]
    shrink = use.sizes.shrink if use.name == "mean" else 1.0
    if flow.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    if flow.is_uniform:  # as many times the same value as there are samples
        ratio = flow.ratio * shrink / use.sizes.shrink
        return [replace(found, kind=Kind.FREE, ratio=ratio)]
    return [replace(found, kind=Kind.SUM, ratio=flow.ratio * shrink)]


def _check_same_dims(use: Use, ref: Ref) -> None:
    """Check that both sizes sum over the same dimensions, apart from those of one element.

    Raises:
        CoupledError: if they do not.
    """
    first, second = use.arguments("dim")
    if first == second:
        return
    num_dims, other = len(use.size_of(ref)), use.other_size_of(ref)
    apart = {dim % num_dims for dim in first or ()} - {dim % num_dims for dim in second or ()}
    is_more = len(first or ()) == len(second or ()) + len(apart)
    if not is_more or not use.argument("keepdim") or any(other[dim] != 1 for dim in apart):
        raise CoupledError("sums over dimensions that depend on the batch size")


def along(use: Use) -> list[Flow]:
    """Work along dimensions in a way that is no sum; they must not be the samples'."""
    if len(use.tensors) != 1:
        raise NotFollowedError("is given more than one tensor")
    ref = use.tensors[0]
    flow = use.flow_of(ref)
    dims = _dims(use, len(flow.axes))
    if any(flow.axes[dim] is not None for dim in dims if dim < len(flow.axes)):
        if not flow.is_uniform or use.name not in _LIKE_ONE:
            raise CoupledError(_TAKES_ALL)
        return [replace(f, kind=Kind.FREE) for f in _results(use, flow, dims)]
    if flow.kind is Kind.SUM:
        raise CoupledError("applies a function to a sum over the batch")
    if not flow.is_plain:
        raise CoupledError("applies a function to values that depend on the batch size")
    return _results(use, flow, dims)


def _results(use: Use, flow: Flow, dims: Sequence[int]) -> list[Flow]:
    """Say of each result whether the dimensions are still there."""
    found = []
    for number, result in enumerate(use.call.results):
        size = use.size_of(result)
        axes = flow.axes if len(size) == len(flow.axes) else _reduced(use, flow, dims)
        if use.argument("keepdim"):
            axes = _reduced(use, flow, dims)
        is_index = use.name in _INDICES or (number == 1 and use.name in _WITH_INDICES)
        found.append(
            Flow(
                kind=Kind.EACH if any(axes) else flow.kind,
                axes=axes,
                is_uniform=flow.is_uniform and not is_index and use.name not in _COUNTING,
                is_drawn=flow.is_drawn,
                sources=frozenset() if is_index else None,
            )
        )
    return found


def selected_values(use: Use) -> list[Flow]:
    """Return values and their places along a dimension, which must not be the samples'."""
    if use.has("k"):
        first, second = use.arguments("k")
        if first != second:
            raise CoupledError("takes a number of elements that depends on the batch size")
    return along(use)


def gradient_along(use: Use) -> list[Flow]:
    """Carry a gradient back through work along a dimension; linear in the gradient."""
    gradient, *others = use.flows
    dims = _dims(use, len(gradient.axes))
    if any(flow.kind is Kind.SUM for flow in others) or any(not f.is_plain for f in others):
        raise CoupledError("applies a function to values that depend on the batch size")
    dims_of = [flow.axes for flow in use.flows if flow.axes]
    if any(axes[dim] is not None for axes in dims_of for dim in dims):
        raise CoupledError(_TAKES_ALL)
    return [replace(gradient, is_uniform=False, value=None, is_drawn=_is_drawn(use))]


def _is_drawn(use: Use) -> bool:
    return any(flow.is_drawn for flow in use.flows)


RULES: Mapping[str, Any] = {
    **dict.fromkeys(("sum", "mean", "nansum", "count_nonzero"), summed),
    **dict.fromkeys(
        ("amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "std_mean", "logsumexp",
         "any", "all", "argmax", "argmin", "norm", "linalg_vector_norm", "softmax", "_softmax",
         "log_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "cummax", "cummin",
         "logcumsumexp", "glu", "aminmax", "nanmedian", "sort", "argsort", "median", "mode",
         "cumulative_trapezoid"),
        along,
    ),
    **dict.fromkeys(("topk", "kthvalue"), selected_values),
    **dict.fromkeys(
        ("_softmax_backward_data", "_log_softmax_backward_data", "glu_backward"), gradient_along
    ),
}  # fmt: skip
