"""Functions whose rows depend on the same rows of what they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from memfit.strategies.convolution_tiling.capture import Call, Ref, Value
from memfit.strategies.convolution_tiling.slabs import (
    Local,
    Rows,
    Slab,
    arguments_of,
    cut,
    filled,
    python_arguments_of,
)


def pointwise(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow a function of single elements, with broadcasting."""
    out = values[call.outs[0]]
    tracked = [index for index in call.inputs if index in dims]
    ends = {dims[index] - len(values[index].shape) for index in tracked}
    extents = {values[index].shape[dims[index]] for index in tracked}
    if len(ends) != 1 or len(extents) != 1:
        return None
    end, extent = ends.pop(), extents.pop()
    if len(out.shape) + end < 0 or out.shape[end] != extent:
        return None
    rest = {index: values[index].shape for index in call.inputs if index not in tracked}
    along = [index for index, shape in rest.items() if len(shape) >= -end and shape[end] != 1]
    if any(rest[index][end] != extent for index in along):
        return None
    if call.name == "prelu" and any(values[index].shape != (1,) for index in call.inputs[1:]):
        return None

    def run(slabs: Mapping[int, Slab], others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        whole = {index: (others[index], 0) for index in along}
        tensors = {index: cut(slab, end, rows) for index, slab in (whole | {**slabs}).items()}
        return _called(call, {**others, **tensors})

    return Local(needs=lambda rows: dict.fromkeys(tracked, rows), run=run, dim=len(out.shape) + end)


def row_by_row(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow a function that mixes other dimensions than that of the rows."""
    source = call.inputs[0]
    if source not in dims or any(each in dims for each in call.inputs[1:]):
        return None
    dim, num_dims = dims[source], len(values[source].shape)
    if not _leaves_out(call, dim, num_dims) or len(values[call.outs[0]].shape) != num_dims:
        return None

    def run(slabs: Mapping[int, Slab], others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        return _called(call, {**others, source: cut(slabs[source], dim, rows)})

    return Local(needs=lambda rows: {source: rows}, run=run, dim=dim)


def _leaves_out(call: Call, dim: int, num_dims: int) -> bool:
    """Return whether a function keeps the rows of a dimension apart."""
    if call.name == "linear":
        return dim < num_dims - 1
    if call.name in {"softmax", "log_softmax"}:
        along = arguments_of(call, ("input", "dim")).get("dim")
        return isinstance(along, int) and along % num_dims != dim
    given = python_arguments_of(call)
    if call.name == "batch_norm":
        return dim > 1 and not given["training"]
    return bool(dim < num_dims - len(given["normalized_shape"]))


def _called(call: Call, tensors: Mapping[int, Tensor]) -> Tensor:
    args, kwargs = filled(call, tensors)
    result: Tensor = call.function(*args, **kwargs)
    return result


def cat(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow tensors that are joined in another dimension than that of the rows."""
    arguments = arguments_of(call, ("tensors", "dim"))
    parts = [part.index for part in arguments["tensors"] if isinstance(part, Ref)]
    if not all(part in dims for part in parts) or len({dims[part] for part in parts}) != 1:
        return None
    dim, along = dims[parts[0]], arguments.get("dim", 0) % len(values[parts[0]].shape)
    if along == dim:
        return None

    def run(slabs: Mapping[int, Slab], _others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        return torch.cat([cut(slabs[part], dim, rows) for part in parts], dim=along)

    return Local(needs=lambda rows: dict.fromkeys(parts, rows), run=run, dim=dim)


def permuted(call: Call, values: Sequence[Value], dims: Mapping[int, int]) -> Local | None:
    """Follow dimensions that change places."""
    (source,) = call.inputs
    num_dims, dim = len(values[source].shape), dims[source]
    if call.name == "transpose":
        named = arguments_of(call, ("input", "dim0", "dim1"))
        pair = [named["dim0"] % num_dims, named["dim1"] % num_dims]
        order = list(range(num_dims))
        order[pair[0]], order[pair[1]] = pair[1], pair[0]
    else:
        given = call.args[1:] or (call.kwargs["dims"],)
        given = given[0] if isinstance(given[0], (tuple, list)) else given
        order = [each % num_dims for each in given]

    def run(slabs: Mapping[int, Slab], _others: Mapping[int, Tensor], rows: Rows) -> Tensor:
        return cut(slabs[source], dim, rows).permute(order)

    return Local(needs=lambda rows: {source: rows}, run=run, dim=order.index(dim))
