"""Operators that look elements up by number, or write them where numbers say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import starmap
from typing import Any

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import Axes, Axis, Flow, Kind, alike, samples_along, sum_over_batch
from memfit.analysis.rules.products import product_of
from memfit.analysis.use import CoupledError, NotFollowedError, Use

_ACROSS = "looks samples up by number, across the batch"


def plain_index(flow: Flow) -> None:
    """Check that the numbers by which is looked up are the same at every size.

    Raises:
        CoupledError: if they are not.
    """
    if flow.kind is Kind.SUM or not flow.is_plain:
        raise CoupledError("looks up by numbers that depend on the whole batch")


def embedded(use: Use) -> list[Flow]:
    """Look rows of a table up, for each sample its own."""
    table, index = use.flows[:2]
    plain_index(index)
    if table.kind is not Kind.FREE:
        raise CoupledError(_ACROSS)
    if index.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    axes = (*index.axes, *(None,) * (len(use.result_size()) - len(index.axes)))
    return [samples_along(axes, index, ratio=table.ratio)]


def embedded_back(use: Use) -> list[Flow]:
    """Add the gradients of looked up rows to their table's."""
    gradient, index = use.flows[:2]
    plain_index(index)
    if use.argument("scale_grad_by_freq"):
        raise CoupledError("scales gradients by how often a row is looked up in the whole batch")
    if gradient.kind is Kind.SUM and index.kind is not Kind.FREE:
        raise CoupledError("multiplies a sum over the batch by each sample")
    _check_rows(gradient, index)
    found = sum_over_batch(len(use.result_size()), gradient.ratio, gradient, index)
    is_sum = Kind.EACH in (gradient.kind, index.kind)
    return [found if is_sum else replace(found, kind=gradient.kind)]


def sparse(use: Use) -> list[Flow]:
    """Lay down rows and their numbers, which stand for a sum over all rows with one number."""
    index, rows = use.known("indices", "values")
    plain_index(index)
    if index.is_positions or len(index.axes) != 2 or index.axes[0] is not None:
        raise CoupledError("uses the positions of samples in the batch")
    if Kind.SUM in (index.kind, rows.kind):
        raise CoupledError("multiplies a sum over the batch by each sample")
    _check_rows(rows, replace(index, axes=index.axes[1:]))
    found = sum_over_batch(len(use.result_size()), rows.ratio, rows, index)
    is_sum = Kind.EACH in (rows.kind, index.kind)
    return [found if is_sum else replace(found, kind=rows.kind)]


def _check_rows(gradient: Flow, index: Flow) -> None:
    """Check that gradients belong to the samples by whose numbers they are added up.

    Raises:
        CoupledError: if they do not.
    """
    if gradient.kind is not Kind.EACH and index.kind is not Kind.EACH:
        return
    pairs = zip(gradient.axes, index.axes, strict=False)
    if not all(starmap(alike, pairs)) or any(gradient.axes[len(index.axes) :]):
        raise CoupledError("brings samples together with other samples of the batch")


def gathered(use: Use) -> list[Flow]:
    """Take elements along a dimension by number; all other dimensions keep their places."""
    values, index = use.known("self", "index")
    plain_index(index)
    if values.kind is Kind.SUM and index.kind is Kind.FREE:
        return [replace(values, axes=index.axes)]
    if values.kind is Kind.SUM:
        raise CoupledError("looks a sum over the batch up for each sample")
    dim = use.argument("dim") % max(1, len(values.axes))
    if values.axes[dim] is not None or (index.axes[dim] is not None and values.kind is Kind.EACH):
        raise CoupledError(_ACROSS)
    return [samples_along(in_step(values, index, dim), values, index, ratio=values.ratio)]


def in_step(values: Flow, index: Flow, dim: int) -> Axes:
    """Check that samples look up in their own rows.

    Raises:
        CoupledError: if they do not.
    """
    found: list[Axis | None] = []
    for place, (one, other) in enumerate(zip(values.axes, index.axes, strict=True)):
        if place == dim:
            found.append(other)
        elif not alike(one, other):
            raise CoupledError("looks up by position in the batch")
        else:
            found.append(other if one is not None and one.wild else one)
    return tuple(found)


def selected(use: Use) -> list[Flow]:
    """Take whole slices of a dimension by number."""
    values, index = use.known("self", "index")
    plain_index(index)
    dim = use.argument("dim") % max(1, len(values.axes))
    if values.kind is Kind.SUM and index.kind is Kind.EACH:
        raise CoupledError("looks a sum over the batch up for each sample")
    is_own = lies_in_own_rows(values, dim, index) and not values.is_positions
    if values.axes[dim] is not None and not is_own:
        raise CoupledError(_ACROSS)
    if index.is_positions and not is_own:
        raise CoupledError("uses the positions of samples in the batch")
    axes = list(values.axes)
    axes[dim] = index.axes[0] if index.axes else None
    if sum(axis is not None for axis in axes) > 1:
        raise CoupledError("compares samples of the batch with one another")
    kind = Kind.EACH if any(axes) else values.kind
    is_drawn = values.is_drawn or index.is_drawn
    return [replace(values, kind=kind, axes=tuple(axes), is_drawn=is_drawn, sources=None)]


def index_axes(use: Use, indices: list[Ref]) -> tuple[list[Axis | None], bool]:
    """Broadcast indices; return the samples' dimension and whether positions are among them."""
    num_dims = max(len(use.size_of(ref)) for ref in indices)
    axes: list[Axis | None] = [None] * num_dims
    for ref in indices:
        flow = use.flow_of(ref)
        plain_index(flow)
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
    (values,), indices = use.known("self"), use.argument("indices")
    given = [ref for ref in indices if isinstance(ref, Ref)]
    if any(use.shape_of(ref).dtype.is_floating_point or is_mask(use, ref) for ref in given):
        raise NotFollowedError("selects by a mask, so that shapes depend on values")
    axes, has_positions = index_axes(use, given)
    places = [place for place, ref in enumerate(indices) if isinstance(ref, Ref)]
    dim = values.batch_dim
    rest = [axis for place, axis in enumerate(values.axes) if place not in places]
    if values.kind is Kind.SUM and any(axes):
        raise CoupledError("looks a sum over the batch up for each sample")
    if dim is not None and dim in places:
        check_own_row(use, values, indices[dim], axes)
    elif has_positions:
        raise CoupledError("uses the positions of samples in the batch")
    elif dim is not None and any(axes):
        raise CoupledError("compares samples of the batch with one another")
    where = place_of_indices(indices)
    found = (*rest[:where], *axes, *rest[where:])
    kind = Kind.EACH if any(found) else values.kind
    made = samples_along(found, values, *map(use.flow_of, given), ratio=values.ratio)
    return [replace(made, kind=kind)]


def is_mask(use: Use, ref: Ref) -> bool:
    """Return whether an index tensor tells which elements are meant, not their numbers."""
    return str(use.shape_of(ref).dtype) in {"torch.bool", "torch.uint8"}


def check_own_row(use: Use, values: Flow, ref: Ref, axes: list[Axis | None]) -> None:
    """Check that each sample is looked up by its own position.

    Raises:
        CoupledError: if it is not.
    """
    index, axis = use.flow_of(ref), values.axes[values.batch_dim or 0]
    own = Axis()
    is_own = index.is_own_position and axis is not None and axis.matches(own)
    if not is_own or not any(each is not None and each.matches(own) for each in axes):
        raise CoupledError(_ACROSS)


def lies_in_own_rows(values: Flow, dim: int, index: Flow) -> bool:
    """Test whether rows are looked up, or added to, by the number of the sample they belong to."""
    axis = values.axes[dim] if values.axes else None
    return index.is_own_position and axis is not None and axis.matches(Axis())


def is_given(indices: tuple[Any, ...], place: int) -> bool:
    """Return whether a dimension is looked up by a tensor of numbers."""
    return place < len(indices) and isinstance(indices[place], Ref)


def place_of_indices(indices: tuple[Any, ...]) -> int:
    """Say where the dimensions of the index tensors come to lie in what is looked up."""
    places = [place for place, ref in enumerate(indices) if isinstance(ref, Ref)]
    is_adjacent = places == list(range(places[0], places[-1] + 1))
    return places[0] if is_adjacent else 0


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
        return [replace(samples_along(first.axes, gradient, ratio=gradient.ratio), kind=Kind.EACH)]
    kind = Kind.SUM if Kind.EACH in (gradient.kind, second.kind) else Kind.FREE
    axes = (None,) * len(use.result_size())
    return [Flow(kind=kind, axes=axes, ratio=gradient.ratio)]


RULES: Mapping[str, Any] = {
    "embedding": embedded,
    "embedding_dense_backward": embedded_back,
    "_sparse_coo_tensor_with_dims_and_tensors": sparse,
    "gather": gathered,
    "index_select": selected,
    **dict.fromkeys(("index", "_unsafe_index"), indexed),
    "_cdist_forward": distances,
    "_cdist_backward": distances_back,
}
