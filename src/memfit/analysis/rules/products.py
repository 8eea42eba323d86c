"""Matrix products, and other operators that contract dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import Axes, Axis, Flow, Kind
from memfit.analysis.rules.pointwise import sum_of
from memfit.analysis.use import CoupledError, Use


def product_of(left: Flow, right: Flow, dims: tuple[Axes, Axes]) -> Flow:
    """Multiply along one dimension.

    Args:
        left: the first factor.
        right: the second factor.
        dims: the samples' dimensions of both, written as (batch, rows, contracted) and (batch,
            contracted, columns).

    Raises:
        CoupledError: if samples meet other samples.
    """
    if left.is_positions or right.is_positions:
        raise CoupledError("uses the positions of samples in the batch")
    known: dict[str, Any] = {
        "ratio": left.ratio * right.ratio,
        "is_drawn": left.is_drawn or right.is_drawn,
    }
    kinds = {left.kind, right.kind}
    if Kind.SUM in kinds:
        if kinds != {Kind.SUM, Kind.FREE}:
            raise CoupledError("multiplies a sum over the batch by something that depends on it")
        return Flow(kind=Kind.SUM, axes=(None,) * 3, **known)
    (batch, rows, contracted), (its_batch, its_contracted, columns) = dims
    kept = (_same(batch, its_batch), rows, columns)
    if _same(contracted, its_contracted) is not None:
        if any(kept):
            raise CoupledError("compares samples of the batch with one another")
        return Flow(kind=Kind.SUM, axes=(None,) * 3, **known)
    if sum(axis is not None for axis in kept) > 1:
        raise CoupledError("compares samples of the batch with one another")
    return Flow(kind=Kind.EACH if any(kept) else Kind.FREE, axes=kept, **known)


def _same(one: Axis | None, other: Axis | None) -> Axis | None:
    if one is None and other is None:
        return None
    if one is None or other is None or not one.matches(other):
        raise CoupledError("brings samples together with something else, by position")
    return other if one.wild else one


def _matrix(flow: Flow) -> Axes:
    """Write the dimensions of a vector, a matrix or a batch of them as three."""
    return (None,) * (3 - len(flow.axes)) + flow.axes


def _multiplied(use: Use, first: Ref, second: Ref) -> Flow:
    left, right = use.flow_of(first), use.flow_of(second)
    num_dims = (len(left.axes), len(right.axes))
    dims: tuple[Axes, Axes]
    if num_dims == (1, 1):
        dims = ((None, None, left.axes[0]), (None, right.axes[0], None))
    elif num_dims[1] == 1:
        dims = (_matrix(left), (None, right.axes[0], None))
    else:
        dims = (_matrix(left), _matrix(right))
    found = product_of(left, right, dims)
    axes = {(1, 1): (), (2, 1): found.axes[1:2], (2, 2): found.axes[1:]}.get(num_dims, found.axes)
    return replace(found, axes=axes)


def multiplied(use: Use) -> list[Flow]:
    """Multiply matrices or vectors."""
    first, second = use.tensors[:2]
    return [_multiplied(use, first, second)]


def added_and_multiplied(use: Use) -> list[Flow]:
    """Add a product of matrices to a tensor."""
    base, first, second = use.tensors[:3]
    product = _multiplied(use, first, second)
    if use.argument("beta") == 0:
        return [product]
    added = use.flow_of(base)
    if Kind.SUM in (added.kind, product.kind):
        return [sum_of(use, [added, product])]
    offset = len(product.axes) - len(added.axes)
    for dim, axis in enumerate(added.axes):
        mine = product.axes[offset + dim]
        if axis is not None and (mine is None or not axis.matches(mine)):
            raise CoupledError("brings samples together with something else, by position")
        if axis is None and mine is not None and use.size_of(base)[dim] != 1:
            raise CoupledError("brings samples together with something else, by position")
    if not (added.is_plain and product.is_plain):
        raise CoupledError("adds values of which only one changes with the batch size")
    return [replace(product, is_drawn=product.is_drawn or added.is_drawn)]


def outer(use: Use) -> list[Flow]:
    """Multiply every element of one vector by every one of another."""
    first, second = use.flows[:2]
    dims = ((None, first.axes[0], None), (None, None, second.axes[0]))
    found = product_of(first, second, dims)
    return [replace(found, axes=found.axes[1:])]


RULES: Mapping[str, Any] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), multiplied),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), added_and_multiplied),
    **dict.fromkeys(("ger", "outer"), outer),
}
