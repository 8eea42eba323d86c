"""Operators that write or add elements where numbers say, and gradients that go back there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import (
    Axes,
    Axis,
    Flow,
    Kind,
    alike,
    same_ratio,
    samples_along,
    sum_over_batch,
)
from memfit.analysis.rules.indexing import (
    check_own_row,
    in_step,
    index_axes,
    is_given,
    is_mask,
    lies_in_own_rows,
    place_of_indices,
    plain_index,
)
from memfit.analysis.rules.pointwise import sum_of
from memfit.analysis.use import CoupledError, NotFollowedError, Use


def scattered(use: Use) -> list[Flow]:
    """Write or add elements along a dimension by number."""
    base, index = use.known("self", "index")
    source = use.flow("src") if use.has("src") else None
    dim = use.argument("dim") % max(1, len(base.axes))
    is_adding = "add" in use.name or not use.argument("reduce")
    is_empty = base.is_zero and is_adding
    written = [base, index] if is_empty else [base, index, *([source] if source else [])]
    if any(flow.kind is Kind.SUM or not flow.is_plain for flow in written):
        raise CoupledError("writes sums over the batch by number")
    if source is not None and source.kind is Kind.SUM:
        raise CoupledError("writes sums over the batch by number")
    if base.axes[dim] is not None or (base.kind is Kind.EACH and index.axes[dim] is not None):
        raise CoupledError("writes to samples by number, across the batch")
    if base.kind is Kind.FREE and index.kind is Kind.EACH:
        return [_added_up(use, base, index, (dim, source))]
    axes = in_step(base, index, dim)
    if source is not None and source.axes and not source.is_uniform:
        in_step(source, index, dim)
    kept = (base.axes[place] if place == dim else axis for place, axis in enumerate(axes))
    scale = source or base
    return [samples_along(kept, index, base, scale, ratio=scale.ratio)]


def _added_up(use: Use, base: Flow, index: Flow, what: tuple[int, Flow | None]) -> Flow:
    """Add samples up into something that has no samples, such as counts of classes."""
    dim, source = what
    scale = source or base
    is_sum = "add" in use.name or use.argument("reduce") in {"sum", "add"}
    if use.argument("include_self") is False or not index.is_plain:
        raise CoupledError("writes samples into something that has no samples")
    if source is not None and source.kind is Kind.EACH:
        _check_alike(source, index)
    if not is_sum or index.axes[dim] is None:
        raise CoupledError("writes samples into something that has no samples")
    return _added_to(use, base, sum_over_batch(len(base.axes), scale.ratio, index))


def _added_to(use: Use, base: Flow, added: Flow) -> Flow:
    """Add a sum to something; zeros change nothing."""
    return added if base.is_zero else sum_of(use, [added, base])


def _check_alike(one: Flow, other: Flow) -> None:
    if not all(starmap(alike, zip(one.axes, other.axes, strict=True))):
        raise CoupledError("looks up by position in the batch")


def put(use: Use) -> list[Flow]:
    """Write or add at places given by tensors of numbers."""
    base, values = use.known("self", "values")
    indices = use.argument("indices")
    given = [ref for ref in indices if isinstance(ref, Ref)]
    if any(is_mask(use, ref) for ref in given):
        raise NotFollowedError("writes by a mask")
    if base.is_positions or values.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    axes, has_positions = index_axes(use, given)
    place = place_of_indices(indices)
    kept = [axis for at, axis in enumerate(base.axes) if not is_given(indices, at)]
    target = [*kept[:place], *axes, *kept[place:]]
    dim = base.batch_dim
    if dim is not None and is_given(indices, dim):
        check_own_row(use, base, indices[dim], axes)
    elif dim is not None:
        if any(axes):
            raise CoupledError("writes to samples by number, across the batch")
    else:
        if has_positions:
            raise CoupledError("uses the positions of samples in the batch")
        return [_put_into_free(use, base, values, target)]
    if values.kind is Kind.SUM:
        raise CoupledError("gives a sum over the batch to each sample")
    _check_lined_up(use, values, target)
    return [_one_scale(base, values)]


def _check_lined_up(use: Use, values: Flow, target: list[Axis | None]) -> None:
    """Check that values, broadcast, meet their own samples' places.

    Raises:
        CoupledError: if they do not.
    """
    size = use.size("values")
    offset = len(target) - len(size)
    for dim, extent in enumerate(size):
        axis, mine = values.axes[dim], target[offset + dim] if offset + dim >= 0 else None
        if axis is None and (mine is None or extent == 1):
            continue
        if axis is None or mine is None or not axis.matches(mine):
            raise CoupledError("writes to samples by position in the batch")


def _one_scale(base: Flow, values: Flow) -> Flow:
    """Write one tensor into another; both must change alike with the size of the batch."""
    scale = values if base.is_zero else base
    if not same_ratio(values.ratio, scale.ratio):
        raise CoupledError("joins values of which only one changes with the batch size")
    return Flow(
        kind=base.kind, axes=base.axes, ratio=scale.ratio,
        is_drawn=base.is_drawn or values.is_drawn,
    )  # fmt: skip


def _put_into_free(use: Use, base: Flow, values: Flow, target: list[Axis | None]) -> Flow:
    """Write or add to something that has no samples, such as the gradient of a table."""
    is_sum = bool(use.argument("accumulate"))
    if any(target):
        if not is_sum or values.kind is Kind.SUM:
            raise CoupledError("writes to samples by number, across the batch")
        _check_lined_up(use, values, target)
        if base.kind is Kind.SUM:
            return sum_of(use, [replace(values, kind=Kind.SUM, axes=base.axes), base])
        return _added_to(use, base, sum_over_batch(len(base.axes), values.ratio, values))
    if values.kind is Kind.EACH or (Kind.SUM in (base.kind, values.kind) and not is_sum):
        raise CoupledError("writes samples into something that has no samples")
    if Kind.SUM not in (base.kind, values.kind):
        return _one_scale(base, values)
    added = replace(values, axes=base.axes, is_uniform=False, value=None)
    return _added_to(use, base, added)


def index_added(use: Use) -> list[Flow]:
    """Add slices where numbers say."""
    base, index, source = use.flows[:3]
    dim = use.argument("dim") % max(1, len(base.axes))
    plain_index(index)
    if index.is_positions:
        return [_added_to_own(use, (base, index, source), dim)]
    if base.kind is not Kind.FREE or source.kind is Kind.SUM or "copy" in use.name:
        raise CoupledError("writes to samples by number, across the batch")
    if any(not flow.is_plain for flow in (base, source)) and base.value != 0.0:
        raise CoupledError("adds values of which only one changes with the batch size")
    if index.kind is Kind.FREE and source.kind is Kind.FREE and base.is_plain and source.is_plain:
        return [replace(base, is_uniform=False, value=None)]
    if not index.axes or index.axes[0] is None or source.axes[dim] is None:
        raise CoupledError("writes samples into something that has no samples")
    if not source.axes[dim].matches(index.axes[0]) or use.argument("alpha") not in (None, 1):
        raise CoupledError("brings samples together with other samples of the batch")
    return [_added_to(use, base, sum_over_batch(len(base.axes), source.ratio, source, index))]


def _added_to_own(use: Use, flows: tuple[Flow, Flow, Flow], dim: int) -> Flow:
    """Add up the rows of each sample: ``zeros.index_add(0, arange.repeat_interleave(t), rows)``.

    Raises:
        CoupledError: if rows are not added to their own sample.
    """
    base, index, source = flows
    axis, its = source.axes[dim], index.axes[0]
    is_own = axis is not None and its is not None and axis.matches(its)
    if not (base.is_zero and is_own and lies_in_own_rows(base, dim, index)) or source.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    if use.argument("alpha") not in (None, 1) or source.kind is not Kind.EACH:
        raise CoupledError("brings samples together with other samples of the batch")
    axes = tuple(Axis() if place == dim else None for place in range(len(base.axes)))
    return Flow(kind=Kind.EACH, axes=axes, ratio=source.ratio, is_drawn=source.is_drawn)


def sliced_back(use: Use) -> list[Flow]:
    """Put a gradient back where it was taken from, among zeros."""
    flow = use.flows[0]
    result = use.call.results[0]
    axes = use.varying_axes(result)
    if flow.kind is not Kind.EACH or not any(axes):
        if any(axes):
            raise CoupledError("gives a gradient to some samples of the batch")
        _check_same_part(use)
        return [_among_zeros(flow, axes)]
    dim = use.argument("dim") % len(axes)
    old = list(flow.axes)
    if use.name == "select_backward":
        old.insert(dim, None)
    if axes[dim] is None:
        _check_same_part(use)
        return [_among_zeros(flow, tuple(old))]
    if old[dim] is None:
        raise CoupledError("takes one sample out of the batch")
    old[dim] = _back_in_place(use, old[dim], axes[dim])
    return [_among_zeros(flow, tuple(old))]


def _back_in_place(use: Use, known: Axis | None, grown: Axis | None) -> Axis:
    """Find the samples in a dimension of which a part was taken.

    Raises:
        NotFollowedError: if the part did not hold all samples.
    """
    assert known is not None
    assert grown is not None
    if use.name == "select_backward" or (known.wild and known.outer * known.inner != 1):
        raise NotFollowedError("takes a part of the samples' dimension")
    count, step = grown.outer * grown.inner, use.argument("step")
    starts = use.arguments("start")
    whole = [size * known.inner for size in (use.sizes.first, use.sizes.second)]
    parts = [divmod(start, length) for start, length in zip(starts, whole, strict=True)]
    is_whole = parts[0] == parts[1] and parts[0][1] == 0
    if step == 1 and count % known.inner == 0 and is_whole:
        return Axis(outer=count // known.inner, inner=known.inner)
    if step == count // known.outer and known.inner == 1 and starts[0] == starts[1] < step:
        return Axis(outer=known.outer, inner=step)
    raise NotFollowedError("takes a part of the samples' dimension")


def _check_same_part(use: Use) -> None:
    for name in ("start", "end", "step", "index"):
        first, second = use.arguments(name) if use.has(name) else (None, None)
        if first != second:
            raise CoupledError("takes a part that depends on the batch size")


def _among_zeros(flow: Flow, axes: Axes) -> Flow:
    return replace(
        flow, axes=axes, is_uniform=False, value=None, is_positions=False, sources=None,
        has_holes=False,
    )  # fmt: skip


def diagonal_back(use: Use) -> list[Flow]:
    """Put a gradient back on the diagonal of two dimensions, which are not the samples'."""
    flow = use.flows[0]
    size = use.result_size()
    dims = sorted(use.argument(name) % len(size) for name in ("dim1", "dim2"))
    if flow.axes and flow.axes[-1] is not None:
        raise CoupledError("takes a diagonal across the samples")
    axes = list(flow.axes[:-1])
    for dim in dims:
        axes.insert(dim, None)
    return [_among_zeros(flow, tuple(axes))]


RULES: Mapping[str, Any] = {
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scattered),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), put),
    **dict.fromkeys(("index_add", "index_copy"), index_added),
    **dict.fromkeys(("slice_backward", "select_backward"), sliced_back),
    **dict.fromkeys(("diagonal_backward", "diag_embed"), diagonal_back),
}
