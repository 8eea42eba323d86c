"""Operators that look elements up by number, or write them where numbers say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import Axes, Axis, Flow, Kind, same_ratio
from memfit.analysis.rules.pointwise import sum_of
from memfit.analysis.rules.products import product_of
from memfit.analysis.use import CoupledError, NotFollowedError, Use

_ACROSS = "looks samples up by number, across the batch"


def _plain_index(flow: Flow) -> None:
    if flow.kind is Kind.SUM or not flow.is_plain:
        raise CoupledError("looks up by numbers that depend on the whole batch")


def embedded(use: Use) -> list[Flow]:
    """Look rows of a table up, for each sample its own."""
    table, index = use.flows[:2]
    _plain_index(index)
    if table.kind is not Kind.FREE:
        raise CoupledError(_ACROSS)
    if index.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    axes = (*index.axes, *(None,) * (len(use.result_size()) - len(index.axes)))
    kind = Kind.EACH if any(axes) else Kind.FREE
    return [Flow(kind=kind, axes=axes, ratio=table.ratio, is_drawn=index.is_drawn)]


def embedded_back(use: Use) -> list[Flow]:
    """Add the gradients of looked up rows to their table's."""
    gradient, index = use.flows[:2]
    _plain_index(index)
    if use.argument("scale_grad_by_freq"):
        raise CoupledError("scales gradients by how often a row is looked up in the whole batch")
    if gradient.kind is Kind.SUM and index.kind is not Kind.FREE:
        raise CoupledError("multiplies a sum over the batch by each sample")
    _check_rows(gradient, index)
    kind = Kind.SUM if Kind.EACH in (gradient.kind, index.kind) else gradient.kind
    return [
        Flow(
            kind=kind,
            axes=(None,) * len(use.result_size()),
            ratio=gradient.ratio,
            is_scaled=gradient.is_scaled,
            is_drawn=gradient.is_drawn or index.is_drawn,
        )
    ]


def _check_rows(gradient: Flow, index: Flow) -> None:
    """Check that gradients belong to the samples by whose numbers they are added up.

    Raises:
        CoupledError: if they do not.
    """
    if gradient.kind is not Kind.EACH and index.kind is not Kind.EACH:
        return
    for one, other in zip(gradient.axes, index.axes, strict=False):
        if (one is None) != (other is None) or (one and other and not one.matches(other)):
            raise CoupledError("brings samples together with other samples of the batch")
    if any(gradient.axes[len(index.axes) :]):
        raise CoupledError("brings samples together with other samples of the batch")


def gathered(use: Use) -> list[Flow]:
    """Take elements along a dimension by number; all other dimensions keep their places."""
    values, index = use.flow("self"), use.flow("index")
    assert values is not None
    assert index is not None
    _plain_index(index)
    if values.kind is Kind.SUM and index.kind is Kind.FREE:
        return [replace(values, axes=index.axes)]
    if values.kind is Kind.SUM:
        raise CoupledError("looks a sum over the batch up for each sample")
    dim = use.argument("dim") % max(1, len(values.axes))
    if values.axes[dim] is not None or (index.axes[dim] is not None and values.kind is Kind.EACH):
        raise CoupledError(_ACROSS)
    axes = _in_step(values, index, dim)
    kind = Kind.EACH if any(axes) else Kind.FREE
    return [
        Flow(
            kind=kind,
            axes=axes,
            ratio=values.ratio,
            is_scaled=values.is_scaled,
            is_drawn=values.is_drawn or index.is_drawn,
        )
    ]


def _in_step(values: Flow, index: Flow, dim: int) -> Axes:
    """Check that samples look up in their own rows.

    Raises:
        CoupledError: if they do not.
    """
    found: list[Axis | None] = []
    for place, (one, other) in enumerate(zip(values.axes, index.axes, strict=True)):
        if place == dim:
            found.append(other)
        elif (one is None) != (other is None) or (
            one is not None and other is not None and not one.matches(other)
        ):
            raise CoupledError("looks up by position in the batch")
        else:
            found.append(other if one is not None and one.wild else one)
    return tuple(found)


def scattered(use: Use) -> list[Flow]:
    """Write or add elements along a dimension by number."""
    base, index = use.flow("self"), use.flow("index")
    assert base is not None
    assert index is not None
    source = use.flow("src") if use.has("src") else None
    dim = use.argument("dim") % max(1, len(base.axes))
    is_adding = "add" in use.name or not use.argument("reduce")
    is_empty = base.is_uniform and base.value == 0.0 and is_adding
    written = [base, index] if is_empty else [base, index, *([source] if source else [])]
    if any(flow.kind is Kind.SUM or not flow.is_plain for flow in written):
        raise CoupledError("writes sums over the batch by number")
    if source is not None and source.kind is Kind.SUM:
        raise CoupledError("writes sums over the batch by number")
    if base.axes[dim] is not None or (base.kind is Kind.EACH and index.axes[dim] is not None):
        raise CoupledError("writes to samples by number, across the batch")
    if base.kind is Kind.FREE and index.kind is Kind.EACH:
        return [_added_up(use, base, index, (dim, source))]
    axes = _in_step(base, index, dim)
    if source is not None and source.axes and not source.is_uniform:
        _in_step(source, index, dim)
    is_drawn = index.is_drawn or base.is_drawn or (source is not None and source.is_drawn)
    kept = tuple(base.axes[place] if place == dim else axis for place, axis in enumerate(axes))
    scale = source or base
    return [
        Flow(
            kind=Kind.EACH if any(kept) else Kind.FREE, axes=kept, is_drawn=is_drawn,
            ratio=scale.ratio, is_scaled=scale.is_scaled,
        )
    ]  # fmt: skip


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
    total = Flow(
        kind=Kind.SUM, axes=(None,) * len(base.axes), is_drawn=index.is_drawn,
        ratio=scale.ratio, is_scaled=scale.is_scaled,
    )  # fmt: skip
    if base.is_uniform and base.value == 0.0:
        return total
    return sum_of(use, [total, base])


def _check_alike(one: Flow, other: Flow) -> None:
    for axis, its in zip(one.axes, other.axes, strict=True):
        if (axis is None) != (its is None) or (axis and its and not axis.matches(its)):
            raise CoupledError("looks up by position in the batch")


def selected(use: Use) -> list[Flow]:
    """Take whole slices of a dimension by number."""
    values, index = use.flow("self"), use.flow("index")
    assert values is not None
    assert index is not None
    _plain_index(index)
    dim = use.argument("dim") % max(1, len(values.axes))
    if values.kind is Kind.SUM and index.kind is Kind.EACH:
        raise CoupledError("looks a sum over the batch up for each sample")
    if values.axes[dim] is not None:
        raise CoupledError(_ACROSS)
    if index.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    axes = list(values.axes)
    axes[dim] = index.axes[0] if index.axes else None
    if sum(axis is not None for axis in axes) > 1:
        raise CoupledError("compares samples of the batch with one another")
    kind = Kind.EACH if any(axes) else values.kind
    is_drawn = values.is_drawn or index.is_drawn
    return [replace(values, kind=kind, axes=tuple(axes), is_drawn=is_drawn, sources=None)]


def _index_axes(use: Use, indices: list[Ref]) -> tuple[list[Axis | None], bool]:
    """Broadcast index tensors; give the samples' dimension and whether positions are among them."""
    num_dims = max(len(use.size_of(ref)) for ref in indices)
    axes: list[Axis | None] = [None] * num_dims
    for ref in indices:
        flow = use.flow_of(ref)
        _plain_index(flow)
        offset = num_dims - len(flow.axes)
        for dim, axis in enumerate(flow.axes):
            mine = axes[offset + dim]
            if axis is not None and mine is not None and not axis.matches(mine):
                raise CoupledError(_ACROSS)
            axes[offset + dim] = axis if mine is None or mine.wild else mine
    if sum(axis is not None for axis in axes) > 1:
        raise CoupledError("compares samples of the batch with one another")
    return axes, any(use.flow_of(ref).is_positions for ref in indices)


def indexed(use: Use) -> list[Flow]:
    """Look up by tensors of numbers (``x[rows, columns]``)."""
    values, indices = use.flow("self"), use.argument("indices")
    assert values is not None
    given = [ref for ref in indices if isinstance(ref, Ref)]
    if any(use.shape_of(ref).dtype.is_floating_point or _is_mask(use, ref) for ref in given):
        raise NotFollowedError("selects by a mask, so that shapes depend on values")
    axes, has_positions = _index_axes(use, given)
    places = [place for place, ref in enumerate(indices) if isinstance(ref, Ref)]
    dim = values.batch_dim
    rest = [axis for place, axis in enumerate(values.axes) if place not in places]
    if values.kind is Kind.SUM and any(axes):
        raise CoupledError("looks a sum over the batch up for each sample")
    if dim is not None and dim in places:
        _check_own_row(use, values, indices[dim], axes)
    elif has_positions:
        raise CoupledError("uses the positions of samples in the batch")
    elif dim is not None and any(axes):
        raise CoupledError("compares samples of the batch with one another")
    where = _place_of_indices(indices)
    found = (*rest[:where], *axes, *rest[where:])
    is_drawn = values.is_drawn or any(use.flow_of(ref).is_drawn for ref in given)
    kind = Kind.EACH if any(found) else values.kind
    return [
        Flow(
            kind=kind, axes=found, ratio=values.ratio, is_scaled=values.is_scaled,
            is_drawn=is_drawn,
        )
    ]  # fmt: skip


def _is_mask(use: Use, ref: Ref) -> bool:
    return str(use.shape_of(ref).dtype) in {"torch.bool", "torch.uint8"}


def _check_own_row(use: Use, values: Flow, ref: Ref, axes: list[Axis | None]) -> None:
    """Check that each sample is looked up by its own position.

    Raises:
        CoupledError: if it is not.
    """
    index, axis = use.flow_of(ref), values.axes[values.batch_dim or 0]
    own = Axis()
    is_own = index.is_positions and axis is not None and axis.matches(own)
    if not is_own or not any(each is not None and each.matches(own) for each in axes):
        raise CoupledError(_ACROSS)


def put(use: Use) -> list[Flow]:
    """Write or add at places given by tensors of numbers."""
    base, values = use.flow("self"), use.flow("values")
    assert base is not None
    assert values is not None
    indices = use.argument("indices")
    given = [ref for ref in indices if isinstance(ref, Ref)]
    if any(_is_mask(use, ref) for ref in given):
        raise NotFollowedError("writes by a mask")
    if base.is_positions or values.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    axes, has_positions = _index_axes(use, given)
    place = _place_of_indices(indices)
    kept = [axis for at, axis in enumerate(base.axes) if not _is_given(indices, at)]
    target = [*kept[:place], *axes, *kept[place:]]
    dim = base.batch_dim
    if dim is not None and _is_given(indices, dim):
        _check_own_row(use, base, indices[dim], axes)
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


def _is_given(indices: tuple[Any, ...], place: int) -> bool:
    return place < len(indices) and isinstance(indices[place], Ref)


def _place_of_indices(indices: tuple[Any, ...]) -> int:
    """Say where the dimensions of the index tensors come to lie in what is looked up."""
    places = [place for place, ref in enumerate(indices) if isinstance(ref, Ref)]
    is_adjacent = places == list(range(places[0], places[-1] + 1))
    return places[0] if is_adjacent else 0


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
    scale = values if base.is_uniform and base.value == 0.0 else base
    if not same_ratio(values.ratio, scale.ratio) or values.is_scaled is not scale.is_scaled:
        raise CoupledError("joins values of which only one changes with the batch size")
    return Flow(
        kind=base.kind, axes=base.axes, ratio=scale.ratio, is_scaled=scale.is_scaled,
        is_drawn=base.is_drawn or values.is_drawn,
    )  # fmt: skip


def _put_into_free(use: Use, base: Flow, values: Flow, target: list[Axis | None]) -> Flow:
    """Write or add to something that has no samples, such as the gradient of a table."""
    is_sum = bool(use.argument("accumulate"))
    if any(target):
        if not is_sum or values.kind is Kind.SUM:
            raise CoupledError("writes to samples by number, across the batch")
        _check_lined_up(use, values, target)
        if base.kind is Kind.SUM or values.is_scaled:
            return sum_of(use, [replace(values, kind=Kind.SUM, axes=base.axes), base])
        total = Flow(kind=Kind.SUM, axes=base.axes, ratio=values.ratio, is_drawn=values.is_drawn)
        is_zero = base.is_uniform and base.value == 0.0
        return total if is_zero else sum_of(use, [total, base])
    if values.kind is Kind.EACH or (Kind.SUM in (base.kind, values.kind) and not is_sum):
        raise CoupledError("writes samples into something that has no samples")
    if Kind.SUM not in (base.kind, values.kind):
        return _one_scale(base, values)
    is_zero = base.is_uniform and base.value == 0.0
    total = replace(values, axes=base.axes, is_uniform=False, value=None)
    return total if is_zero else sum_of(use, [total, base])


def index_added(use: Use) -> list[Flow]:
    """Add slices where numbers say."""
    base, index, source = use.flows[:3]
    dim = use.argument("dim") % max(1, len(base.axes))
    _plain_index(index)
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
    total = Flow(
        kind=Kind.SUM, axes=(None,) * len(base.axes), ratio=source.ratio,
        is_drawn=source.is_drawn or index.is_drawn,
    )  # fmt: skip
    if base.is_uniform and base.value == 0.0:
        return [total]
    return [sum_of(use, [total, base])]


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


def distances(use: Use) -> list[Flow]:
    """Measure distances between the rows of two tensors."""
    left, right = use.flows[:2]
    one = (*(None,) * (3 - len(left.axes)), *left.axes)
    other = (*(None,) * (3 - len(right.axes)), *right.axes)
    if one[2] is not None or other[2] is not None or not (left.is_plain and right.is_plain):
        raise CoupledError("works along the samples")
    found = product_of(left, right, ((one[0], one[1], None), (other[0], None, other[1])))
    return [replace(found, axes=found.axes[-len(use.result_size()) :])]


def distances_back(use: Use) -> list[Flow]:
    """Carry a gradient back through distances."""
    gradient, first, second = use.flows[:3]
    if any(f.kind is Kind.SUM for f in (gradient, first, second)):
        raise CoupledError("multiplies a sum over the batch by each sample")
    result = use.call.results[0]
    if any(use.varying_axes(result)):
        return [Flow(kind=Kind.EACH, axes=first.axes, ratio=gradient.ratio,
                     is_drawn=gradient.is_drawn)]  # fmt: skip
    kind = Kind.SUM if Kind.EACH in (gradient.kind, second.kind) else Kind.FREE
    axes = (None,) * len(use.result_size())
    return [Flow(kind=kind, axes=axes, ratio=gradient.ratio, is_scaled=gradient.is_scaled)]


RULES: Mapping[str, Any] = {
    "embedding": embedded,
    "embedding_dense_backward": embedded_back,
    "gather": gathered,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scattered),
    "index_select": selected,
    **dict.fromkeys(("index", "_unsafe_index"), indexed),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), put),
    **dict.fromkeys(("index_add", "index_copy"), index_added),
    **dict.fromkeys(("slice_backward", "select_backward"), sliced_back),
    "_cdist_forward": distances,
    "_cdist_backward": distances_back,
}
