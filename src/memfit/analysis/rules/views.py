"""Operators that look at the same elements in another way, or move them without changing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from memfit.analysis.dataflow import Ref, Shape
from memfit.analysis.flow import Axes, Axis, Flow, Kind
from memfit.analysis.use import CoupledError, NotFollowedError, Use


def _first(use: Use) -> tuple[Ref, Flow]:
    ref = use.tensors[0]
    return ref, use.flow_of(ref)


def _moved(flow: Flow, axes: Sequence[Axis | None]) -> Flow:
    """Return the same tensor with its dimensions elsewhere."""
    return replace(flow, axes=tuple(axes), value=flow.value if flow.is_uniform else None)


def reshaped(use: Use) -> list[Flow]:
    """Split and merge dimensions; samples stay whole where the order of elements allows it."""
    ref, flow = _first(use)
    if flow.is_uniform:
        return [_moved(flow, use.varying_axes(use.call.results[0]))]
    if flow.kind is not Kind.EACH:
        return [_moved(flow, (None,) * len(use.result_size()))]
    extents, result = use.size_of(ref), use.result_size()
    varying = use.varying_axes(use.call.results[0])
    return [_moved(flow, _split_and_merged(extents, flow.axes, result, varying))]


def _split_and_merged(
    extents: Sequence[int], axes: Axes, result: Sequence[int], varying: Axes
) -> Axes:
    """Find the samples' dimension after a reshape.

    Raises:
        CoupledError: if elements of several samples come to lie in one row.
    """
    dim = next(place for place, axis in enumerate(axes) if axis is not None)
    axis = axes[dim]
    assert axis is not None
    before = prod(extents[:dim]) * axis.outer
    after = axis.inner * prod(extents[dim + 1 :])
    target = next((place for place, each in enumerate(varying) if each is not None), None)
    if target is None or sum(each is not None for each in varying) > 1:
        raise CoupledError("lays samples out so that they cannot be told apart")
    new = varying[target]
    assert new is not None
    count = new.outer * new.inner
    leading, trailing = prod(result[:target]), prod(result[target + 1 :])
    if axis.wild and leading * count * trailing == before * after:
        return _wild_target(axes, dim, (extents, result), target, count)
    outer, rest = divmod(before, leading) if leading else (0, 1)
    inner, other_rest = divmod(after, trailing) if trailing else (0, 1)
    if rest or other_rest or outer * inner != count:
        raise CoupledError("brings elements of different samples into one row")
    return tuple(
        Axis(outer=outer, inner=inner) if place == target else None for place in range(len(result))
    )


def _wild_target(
    axes: Axes, dim: int, sizes: tuple[Sequence[int], Sequence[int]], target: int, count: int
) -> Axes:
    """Follow a dimension along which all samples are alike, or drawn apart."""
    extents, result = sizes
    axis = axes[dim]
    assert axis is not None
    is_same = prod(extents[:dim]) == prod(result[:target]) and extents[dim] == result[target]
    if is_same:
        return tuple(axis if place == target else None for place in range(len(result)))
    leading, trailing = prod(result[:target]), prod(result[target + 1 :])
    before, after = prod(extents[:dim]), prod(extents[dim + 1 :])
    for outer in (n for n in range(1, count + 1) if count % n == 0):
        inner = count // outer
        its_outer, rest = divmod(leading * outer, before)
        its_inner, other_rest = divmod(inner * trailing, after)
        if not rest and not other_rest and its_outer * its_inner == axis.outer * axis.inner:
            found = Axis(outer=outer, inner=inner)
            return tuple(found if place == target else None for place in range(len(result)))
    raise CoupledError("brings elements of different samples into one row")


def permuted(use: Use) -> list[Flow]:
    """Put the dimensions in another order."""
    _, flow = _first(use)
    dims = [dim % len(flow.axes) for dim in use.argument("dims")]
    return [_moved(flow, [flow.axes[dim] for dim in dims])]


def transposed(use: Use) -> list[Flow]:
    """Exchange two dimensions; ``t`` those of a matrix."""
    _, flow = _first(use)
    axes = list(flow.axes)
    if not axes:
        return [flow]
    first, second = (use.argument("dim0"), use.argument("dim1")) if use.has("dim0") else (0, -1)
    axes[first], axes[second] = axes[second], axes[first]
    return [_moved(flow, axes)]


def unsqueezed(use: Use) -> list[Flow]:
    """Add a dimension of one element."""
    _, flow = _first(use)
    axes = list(flow.axes)
    axes.insert(use.argument("dim") % (len(axes) + 1), None)
    return [_moved(flow, axes)]


def squeezed(use: Use) -> list[Flow]:
    """Drop dimensions of one element."""
    ref, flow = _first(use)
    extents = use.size_of(ref)
    dims = use.argument("dim")
    if dims is None:
        wanted = set(range(len(extents)))
    else:
        given = dims if isinstance(dims, tuple) else (dims,)
        wanted = {dim % max(1, len(extents)) for dim in given}
    dropped = {dim for dim in wanted if dim < len(extents) and extents[dim] == 1}
    if any(flow.axes[dim] is not None for dim in dropped):
        raise CoupledError("drops the dimension of the samples where there is only one")
    return [_moved(flow, [axis for dim, axis in enumerate(flow.axes) if dim not in dropped])]


def expanded(use: Use) -> list[Flow]:
    """Repeat a tensor along dimensions of one element, or new ones."""
    ref, flow = _first(use)
    offset = len(use.result_size()) - len(use.size_of(ref))
    axes: list[Axis | None] = [*(None,) * offset, *flow.axes]
    varying = use.varying_axes(use.call.results[0])
    for dim, axis in enumerate(varying):
        if axis is None or axes[dim] is not None:
            continue
        if flow.kind is Kind.SUM:
            raise CoupledError("gives a sum over the batch to each sample")
        axes[dim] = axis
    if sum(axis is not None for axis in axes) > 1:
        raise CoupledError("gives each sample to the others")
    is_uniform = flow.is_uniform or (flow.kind is Kind.FREE and use.shape_of(ref).numel == 1)
    moved = _moved(flow, axes)
    kind = Kind.EACH if any(axes) else flow.kind
    return [replace(moved, kind=kind, is_uniform=is_uniform)]


def selected(use: Use) -> list[Flow]:
    """Take one element of a dimension."""
    _, flow = _first(use)
    dim = use.argument("dim") % len(flow.axes)
    if flow.axes[dim] is not None:
        if flow.is_uniform:
            return [_without_samples(flow, dim)]
        raise CoupledError("takes one sample out of the batch")
    return [_moved(flow, [axis for place, axis in enumerate(flow.axes) if place != dim])]


def _without_samples(flow: Flow, dim: int) -> Flow:
    axes = tuple(axis for place, axis in enumerate(flow.axes) if place != dim)
    return replace(flow, kind=Kind.FREE, axes=axes)


def sliced(use: Use) -> list[Flow]:
    """Take a range of a dimension."""
    ref, flow = _first(use)
    dim = use.argument("dim") % len(flow.axes)
    axis = flow.axes[dim]
    ranges = []
    for size, start, end, step in zip(
        (use.size_of(ref)[dim], use.other_size_of(ref)[dim]),
        use.arguments("start"),
        use.arguments("end"),
        use.arguments("step"),
        strict=True,
    ):
        ranges.append(range(size)[slice(start, end, step)])
    if axis is None:
        if ranges[0] != ranges[1]:
            raise CoupledError("takes a part that depends on the batch size")
        return [_moved(flow, flow.axes)]
    axes = list(flow.axes)
    axes[dim] = _part_of(axis, (ranges[0], ranges[1]), use)
    return [_moved(flow, axes)]


def _part_of(axis: Axis, ranges: tuple[range, range], use: Use) -> Axis:
    """Find the samples in a part of their dimension.

    Raises:
        CoupledError: if the part holds some samples and not others.
    """
    if axis.wild:
        count, rest = divmod(len(ranges[0]), use.sizes.first)
        if not rest and count * use.sizes.second == len(ranges[1]):
            return Axis(outer=1, inner=count, wild=True)
        raise CoupledError("takes some samples out of the batch")
    if all(part.step == 1 for part in ranges):
        found = []
        for part, size in zip(ranges, (use.sizes.first, use.sizes.second), strict=True):
            whole = size * axis.inner
            found.append((*divmod(part.start, whole), *divmod(len(part), whole)))
        if found[0] == found[1] and found[0][1] == 0 and found[0][3] == 0 and found[0][2]:
            return Axis(outer=found[0][2], inner=axis.inner)
    parts = [(part.start, part.step) for part in ranges]
    if parts[0] == parts[1] and parts[0][1] == axis.inner and parts[0][0] < axis.inner:
        lengths = [len(part) for part in ranges]
        if lengths == [axis.outer * use.sizes.first, axis.outer * use.sizes.second]:
            return Axis(outer=axis.outer, inner=1)
    raise CoupledError("takes some samples out of the batch")


def parted(use: Use) -> list[Flow]:
    """Cut a tensor into parts along a dimension."""
    _, flow = _first(use)
    if use.name in {"unbind"}:
        return [selected(use)[0]] * len(use.call.results)
    dim = use.argument("dim") % len(flow.axes)
    axis = flow.axes[dim]
    found, starts = [], [0, 0]
    for result in use.call.results:
        axes = list(flow.axes)
        lengths = (use.size_of(result)[dim], use.other_size_of(result)[dim])
        if axis is not None:
            ranges = tuple(
                range(start, start + length) for start, length in zip(starts, lengths, strict=True)
            )
            axes[dim] = _part_of(axis, (ranges[0], ranges[1]), use)
        starts = [start + length for start, length in zip(starts, lengths, strict=True)]
        found.append(_moved(flow, axes))
    return found


def turned(use: Use) -> list[Flow]:
    """Reverse or rotate along dimensions, which must not be the samples'."""
    _, flow = _first(use)
    dims = use.argument("dims") or tuple(range(len(flow.axes)))
    if not flow.is_uniform and any(flow.axes[dim] is not None for dim in dims):
        raise CoupledError("moves samples to other places in the batch")
    return [_moved(flow, flow.axes)]


def same(use: Use) -> list[Flow]:
    """Return the same tensor."""
    _, flow = _first(use)
    return [flow] * len(use.call.results)


def diagonal(use: Use) -> list[Flow]:
    """Take the diagonal of two dimensions, which must not be the samples'."""
    _, flow = _first(use)
    dims = [use.argument(name) % len(flow.axes) for name in ("dim1", "dim2")]
    if any(flow.axes[dim] is not None for dim in dims):
        raise CoupledError("takes a diagonal across the samples")
    kept = [axis for dim, axis in enumerate(flow.axes) if dim not in dims]
    return [_moved(flow, [*kept, None])]


def strided(use: Use) -> list[Flow]:
    """Look at memory with given strides: followed where nothing changes, or nothing is known."""
    ref, flow = _first(use)
    result = use.call.results[0]
    one, other = use.shape_of(ref), use.shape_of(result)
    if (one.sizes, one.stride, one.offset) == (other.sizes, other.stride, other.offset):
        return [flow]
    if flow.is_uniform:
        return [_moved(flow, use.varying_axes(result))]
    if flow.kind is not Kind.EACH and _covers(one, other):
        return [_moved(flow, (None,) * len(other.sizes))]
    raise NotFollowedError("looks at memory with strides of its own")


def _covers(one: Shape, other: Shape) -> bool:
    """Return whether a tensor without gaps in memory holds all elements of another view."""
    is_dense = one.last - one.offset + 1 == one.numel
    return is_dense and one.offset <= other.offset and other.last <= one.last


def padded(use: Use) -> list[Flow]:
    """Add constants around the last dimensions, which must not be the samples'."""
    _, flow = _first(use)
    pad = use.argument("pad")
    for number in range(len(pad) // 2):
        is_padded = pad[2 * number] or pad[2 * number + 1]
        if is_padded and flow.axes[-1 - number] is not None:
            raise CoupledError("pads the batch with samples of its own")
    value = use.argument("value") if use.has("value") else 0
    if value and (flow.kind is Kind.SUM or not flow.is_plain):
        raise CoupledError("pads values that depend on the batch size with a constant")
    return [replace(flow, is_uniform=False, value=None, has_holes=True)]


def unfolded(use: Use) -> list[Flow]:
    """Take windows along a dimension, which must not be the samples'."""
    _, flow = _first(use)
    dim = use.argument("dimension") % len(flow.axes)
    if flow.axes[dim] is not None:
        raise CoupledError("takes windows over the samples")
    return [_moved(flow, [*flow.axes, None])]


def repeated(use: Use) -> list[Flow]:
    """Repeat a tensor along its dimensions."""
    ref, flow = _first(use)
    repeats = use.argument("repeats")
    offset = len(repeats) - len(use.size_of(ref))
    axes: list[Axis | None] = [*(None,) * offset, *flow.axes]
    varying = use.varying_axes(use.call.results[0])
    for dim, axis in enumerate(axes):
        if axis is not None and repeats[dim] != 1:
            axes[dim] = replace(axis, outer=axis.outer * repeats[dim])
        elif axis is None and varying[dim] is not None:
            axes[dim] = _for_each(flow, varying[dim])
    if sum(axis is not None for axis in axes) > 1:
        raise CoupledError("gives each sample to the others")
    return [replace(_moved(flow, axes), kind=Kind.EACH if any(axes) else flow.kind)]


def _for_each(flow: Flow, varying: Axis | None) -> Axis | None:
    """Repeat something that has no samples as often as there are samples."""
    if flow.kind is Kind.SUM:
        raise CoupledError("gives a sum over the batch to each sample")
    return None if varying is None else replace(varying, wild=False)


RULES: Mapping[str, Any] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten"), reshaped),
    "permute": permuted,
    **dict.fromkeys(("transpose", "t"), transposed),
    "unsqueeze": unsqueezed,
    "squeeze": squeezed,
    **dict.fromkeys(("expand", "broadcast_to"), expanded),
    "select": selected,
    **dict.fromkeys(("slice", "narrow"), sliced),
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes",
         "unsafe_chunk", "chunk", "unbind", "tensor_split"), parted),
    **dict.fromkeys(("flip", "roll"), turned),
    **dict.fromkeys(("detach", "alias", "lift", "lift_fresh", "_to_dense", "view_of",
                     "requires_grad", "_lazy_clone"), same),
    "diagonal": diagonal,
    "as_strided": strided,
    "constant_pad_nd": padded,
    "unfold": unfolded,
    "repeat": repeated,
}  # fmt: skip
