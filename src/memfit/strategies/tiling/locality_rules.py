"""Says for each operator where the positions of its operands go; see ``locality``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Axes = tuple[int, ...]
"""The axes of positions that one dimension of a tensor runs over; empty for other dimensions."""
Labels = tuple[Axes, ...]
"""The axes of every dimension of a tensor."""


class PositionsMixedError(Exception):
    """Say which operator may bring positions together."""


class OwnGeneratorError(Exception):
    """Say that random numbers come from a generator that is not torch's global one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of an operator: its arguments by name, one of its results, and what is known.

    ``labels_of`` gives the axes of a tensor's dimensions, ``extents`` the number of positions of
    each axis.
    """

    arguments: Mapping[str, Any]
    out: torch.Tensor
    labels_of: Callable[[torch.Tensor], Labels]
    extents: Mapping[int, int]


Rule = Callable[[Use], Labels]
"""Gives the axes of a result, or raises PositionsMixedError."""


def rule_of(func: Any) -> Rule | None:
    """Find the rule of an operator; None if nothing is known of it."""
    if torch.Tag.pointwise in func.tags:
        return _aligned
    return _RULES.get(func.overloadpacket.__name__)


def is_view(rule: Rule) -> bool:
    """Return whether operators under a rule only look at elements in another way."""
    return rule in (_expanded, _moved, _viewed)


def has_sizes(rule: Rule) -> bool:
    """Return whether operators under a rule are given the sizes of dimensions."""
    return rule in (_expanded, _viewed)


def tensors_of(values: Any) -> list[torch.Tensor]:
    """List the tensors among arguments or results."""
    leaves = tree_leaves(dict(values) if isinstance(values, Mapping) else values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def reach_of(use: Use, along: int) -> int:
    """Return how far a convolution reaches to either side along an axis.

    Raises:
        PositionsMixedError: if its output has not the positions of its input.
    """
    labels = use.labels_of(use.arguments["input"])
    reach = 0
    for index, size in enumerate(use.arguments["weight"].shape[2:]):
        if not labels[index + 2]:
            continue
        stride, padding, dilation = (
            values[index] if len(values) > 1 else values[0]
            for values in (use.arguments[name] for name in ("stride", "padding", "dilation"))
        )
        if use.arguments["transposed"] or stride != 1 or 2 * padding != dilation * (size - 1):
            raise PositionsMixedError("a convolution whose output has other positions")
        reach += int(padding) if along in labels[index + 2] else 0
    return reach


def _aligned(use: Use) -> Labels:
    """Line operands up by their last dimensions, as broadcasting does."""
    return _broadcast(_labelled_shapes(use, tensors_of(use.arguments)), use.out.dim())


def _along_dims(use: Use) -> Labels:
    """Let an operator work along the dimensions that it names, which must be no positions."""
    operands = [tensor for tensor in tensors_of(use.arguments) if any(use.labels_of(tensor))]
    first = operands[0]
    worked_on = _named_dims(use.arguments.get("dim"), first.dim())
    # Sizes along these dimensions may differ (concatenation); they carry no axes.
    shapes = [
        (
            use.labels_of(tensor),
            [1 if d in worked_on else n for d, n in enumerate(tensor.shape)],
        )
        for tensor in tensors_of(use.arguments)
    ]
    labels = _broadcast(shapes, first.dim())
    if any(labels[dim] for dim in worked_on):
        raise PositionsMixedError("an operator works along positions")
    if use.out.dim() == first.dim():
        return labels
    return tuple(label for dim, label in enumerate(labels) if dim not in worked_on)


def _normalised(use: Use) -> Labels:
    """Normalise over the last dimensions, which must be no positions."""
    labels = use.labels_of(use.arguments["input"])
    num_normalised = len(use.arguments["normalized_shape"])
    affine = [use.arguments.get(name) for name in ("weight", "bias")]
    if any(labels[-num_normalised:]) or any(
        any(use.labels_of(tensor)) for tensor in affine if tensor is not None
    ):
        raise PositionsMixedError("a normalisation over positions")
    return labels


def _multiplied(use: Use) -> Labels:
    """Multiply matrices: rows of one or columns of the other may be positions."""
    names = ("mat1", "mat2") if "mat1" in use.arguments else ("self", "mat2")
    names = ("batch1", "batch2") if "batch1" in use.arguments else names
    left, right = (use.labels_of(use.arguments[name]) for name in names)
    if any(left[:-2]) or any(right[:-2]) or left[-1] or right[-2] or (left[-2] and right[-1]):
        raise PositionsMixedError("a matrix product over positions")
    labels = (*left[:-2], left[-2], right[-1])
    if "self" not in names and any(use.labels_of(use.arguments["self"])):
        added = _labelled_shapes(use, [use.arguments["self"]])
        return _broadcast([*added, (labels, use.out.shape)], use.out.dim())
    return labels


def _convolved(use: Use) -> Labels:
    """Convolve: see reach_of for what is asked of it along positions."""
    labels = use.labels_of(use.arguments["input"])
    others = [use.arguments["weight"], use.arguments["bias"]]
    if labels[1] or any(any(use.labels_of(t)) for t in others if t is not None):
        raise PositionsMixedError("a convolution that sums over positions")
    return labels


def _viewed(use: Use) -> Labels:
    """Merge and split dimensions, as far as positions stay among themselves."""
    tensor = use.arguments["self"]
    labels = use.labels_of(tensor)
    result: list[Axes] = [()] * use.out.dim()
    for dims, new_dims in _groups(tensor.shape, use.out.shape):
        axes = [axis for dim in dims for axis in labels[dim]]
        if math.prod(tensor.shape[d] for d in dims) != _size(axes, use) and axes:
            raise PositionsMixedError("a view that merges positions with other dimensions")
        for dim in new_dims if axes else ():
            taken: list[int] = []
            while axes and _size(taken, use) < use.out.shape[dim]:
                taken.append(axes.pop(0))
            if _size(taken, use) != use.out.shape[dim]:
                raise PositionsMixedError("a view that cuts positions apart")
            result[dim] = tuple(taken)
    return tuple(result)


def _expanded(use: Use) -> Labels:
    """Repeat along dimensions of size 1, which are no positions."""
    return _broadcast(_labelled_shapes(use, [use.arguments["self"]]), use.out.dim())


def _moved(use: Use) -> Labels:
    """Reorder dimensions."""
    labels = use.labels_of(use.arguments["self"])
    if "dims" in use.arguments:
        return tuple(labels[dim] for dim in use.arguments["dims"])
    order = list(range(len(labels)))
    first, second = use.arguments.get("dim0", 0), use.arguments.get("dim1", 1)
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return tuple(labels[dim] for dim in order)


def _like(use: Use) -> Labels:
    """Make a tensor of the same shape."""
    return use.labels_of(use.arguments["self"])


# --- Small steps of the rules ---


def _broadcast(operands: Iterable[tuple[Labels, Sequence[int]]], num_dims: int) -> Labels:
    """Return the axes of what is broadcast together.

    Raises:
        PositionsMixedError: if positions meet a dimension that is no positions, such as a parameter
            for every position.
    """
    entries: list[list[tuple[Axes, int]]] = [[] for _ in range(num_dims)]
    for labels, shape in operands:
        for back in range(1, len(shape) + 1):
            entries[-back].append((labels[-back], shape[-back]))
    result: list[Axes] = []
    for entry in entries:
        axes = {label for label, _ in entry if label}
        others = {size for label, size in entry if not label}
        if len(axes) > 1 or (axes and others - {1}):
            raise PositionsMixedError("an operator adds to positions what is no position")
        result.append(axes.pop() if axes else ())
    return tuple(result)


def _groups(
    shape: Sequence[int], new_shape: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Pair the smallest runs of dimensions that hold the same elements, leaving out sizes of 1."""
    dims = iter([dim for dim, size in enumerate(shape) if size != 1])
    new_dims = iter([dim for dim, size in enumerate(new_shape) if size != 1])
    for dim in dims:
        group, new_group = [dim], [next(new_dims)]
        size, new_size = shape[dim], new_shape[new_group[0]]
        while size != new_size:
            if size < new_size:
                group.append(next(dims))
                size *= shape[group[-1]]
            else:
                new_group.append(next(new_dims))
                new_size *= new_shape[new_group[-1]]
        yield group, new_group


def _size(axes: Iterable[int], use: Use) -> int:
    return math.prod(use.extents[axis] for axis in axes)


def _labelled_shapes(
    use: Use, tensors: Iterable[torch.Tensor]
) -> list[tuple[Labels, Sequence[int]]]:
    return [(use.labels_of(tensor), tensor.shape) for tensor in tensors]


def _named_dims(dim: Any, num_dims: int) -> set[int]:
    """Read a ``dim`` argument; none at all means every dimension."""
    if dim is None or dim == []:
        return set(range(num_dims))
    return {each % num_dims for each in ([dim] if isinstance(dim, int) else dim)}


def _rules() -> Iterator[tuple[Rule, str]]:
    """Yield the rules with the names of their operators."""
    yield _aligned, "_prelu_kernel _to_copy alias bernoulli bernoulli_ copy_ detach"
    yield _aligned, "masked_fill native_dropout rrelu_with_noise zero_ fill_"
    yield _like, "empty_like full_like ones_like rand_like randn_like zeros_like"
    yield _along_dims, "_log_softmax _softmax amax amin cat glu linalg_vector_norm logsumexp mean"
    yield _along_dims, "select slice split split_with_sizes std sum unbind var var_mean"
    yield _normalised, "_fused_rms_norm native_layer_norm"
    yield _multiplied, "addmm bmm mm"
    yield _convolved, "convolution"
    yield _expanded, "expand"
    yield _viewed, "_unsafe_view squeeze unsqueeze view"
    yield _moved, "permute t transpose"


_RULES: Mapping[str, Rule] = {name: rule for rule, names in _rules() for name in names.split()}
