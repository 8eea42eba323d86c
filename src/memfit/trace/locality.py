"""Tells from the operators of a function whether it treats the positions of a tensor apart.

A function is run on a meta tensor, which has a shape and no values. Some dimensions of its input
are axes of positions, such as tokens or rows of an image. Each operator is asked where the axes of
its operands go; one that is not known to keep positions apart ends the matter. What is left are
functions whose output at a position depends on the input there and, by convolutions, on at most
``halo`` positions to either side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Axes = tuple[int, ...]
"""The axes of positions that one dimension of a tensor runs over; empty for other dimensions."""
Labels = tuple[Axes, ...]
"""The axes of every dimension of a tensor."""
_Arguments = Mapping[str, Any]


class PositionsMixedError(Exception):
    """Say which operator may bring positions together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """How a function treats positions.

    Attributes:
        halo: how many positions to either side an output depends on.
        draws: whether it draws random numbers, for each position its own.
        num_steps: how many operators work on positions, views not counted.
        calls: its operators with the numbers they are given, apart from sizes.
    """

    halo: int
    draws: bool
    num_steps: int
    calls: tuple[tuple[Any, ...], ...]


def locality(
    function: Callable[[torch.Tensor], Any],
    shape: Sequence[int],
    axes: Sequence[int],
    fixed: Iterable[torch.Tensor],
) -> Locality:
    """Run a function on a meta tensor and follow the positions of its input to its output.

    Args:
        function: takes the tensor, and uses no other tensors than meta tensors.
        shape: of the tensor.
        axes: the dimensions that are positions.
        fixed: tensors that the function must not change: its parameters and buffers.

    Raises:
        PositionsMixedError: if an operator may bring positions together, if the output has not the
            positions of the input, or if a tensor is changed that must not be.
    """
    inputs = torch.empty(tuple(shape), device="meta")
    follower = _Follower(inputs, axes, fixed)
    with torch.no_grad(), follower:
        out = function(inputs)
    return follower.judged(out)


class _Follower(TorchDispatchMode):
    """Follow the axes of positions from operator to operator."""

    def __init__(
        self, inputs: torch.Tensor, axes: Sequence[int], fixed: Iterable[torch.Tensor]
    ) -> None:
        super().__init__()
        self._axes, self._inputs = axes, inputs
        # Axes of one position need no following, and cannot be told from other dimensions.
        self.extents = {dim: inputs.shape[dim] for dim in axes if inputs.shape[dim] > 1}
        self._fixed = {_storage(tensor) for tensor in (inputs, *fixed)}
        # Every tensor is kept, so that an id means one tensor.
        self._labels: dict[int, tuple[torch.Tensor, Labels]] = {}
        self._halos: dict[int, int] = {}
        self._drawn: set[int] = set()
        self._calls: list[tuple[Any, ...]] = []
        self._num_steps = 0
        self._remember(inputs, tuple((d,) if d in self.extents else () for d in _dims(inputs)))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        arguments = _named(func, args, kwargs or {})
        operands = _tensors(arguments)
        self._refuse_changes(func, arguments)
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if not any(any(self.labels_of(tensor)) for tensor in operands):
            # What all positions share may be anything, but not drawn anew for every tile.
            if is_drawn:
                raise PositionsMixedError(str(func))
            self._note_call(func, arguments)
            return out
        rule = _rule_of(func)
        if rule is None:
            raise PositionsMixedError(str(func))
        if rule not in (_viewed, _expanded):
            self._note_call(func, arguments)
        self._num_steps += rule not in (_expanded, _moved, _viewed)
        self._spread(func, arguments, operands, out)
        for tensor in _tensors(out):
            self._remember(tensor, rule(self, arguments, tensor))
        return out

    def labels_of(self, tensor: torch.Tensor) -> Labels:
        """Give the axes of a tensor's dimensions."""
        known = self._labels.get(id(tensor))
        return known[1] if known else ((),) * tensor.dim()

    def judged(self, out: Any) -> Locality:
        """Say how the function treats positions, now that its output is known."""
        if not isinstance(out, torch.Tensor) or out.dim() != self._inputs.dim():
            raise PositionsMixedError("its output is no tensor with the dimensions of its input")
        labels = self.labels_of(out)
        if any(labels[dim] != ((dim,) if dim in self.extents else ()) for dim in self._axes) or any(
            out.shape[dim] != self._inputs.shape[dim] for dim in self._axes
        ):
            raise PositionsMixedError("its output has other positions than its input")
        if _storage(out) in self._fixed:
            raise PositionsMixedError("its output shares memory with its input")
        return Locality(
            halo=self._halos.get(_storage(out), 0),
            draws=bool(self._drawn),
            num_steps=self._num_steps,
            calls=tuple(self._calls),
        )

    def _remember(self, tensor: torch.Tensor, labels: Labels) -> None:
        self._labels[id(tensor)] = (tensor, labels)

    def _note_call(self, func: Any, arguments: _Arguments) -> None:
        """Keep the numbers that an operator is given, which must not depend on the extents."""
        numbers = tuple(
            value for value in tree_leaves(dict(arguments)) if isinstance(value, (int, float))
        )
        self._calls.append((str(func), *numbers))

    def _refuse_changes(self, func: Any, arguments: _Arguments) -> None:
        """Refuse operators that write into the input, a parameter or a buffer."""
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = arguments.get(argument.name)
            if written and isinstance(value, torch.Tensor) and _storage(value) in self._fixed:
                raise PositionsMixedError(f"{func} changes the input, a parameter or a buffer")

    def _spread(
        self, func: Any, arguments: _Arguments, operands: Sequence[torch.Tensor], out: Any
    ) -> None:
        """Pass halo and randomness on, by storage: what is changed in place is seen by all views.

        Raises:
            PositionsMixedError: if a convolution reads random numbers of other positions: tiles
                that overlap would draw them twice.
        """
        storages = {_storage(tensor) for tensor in operands}
        halo = max(self._halos.get(storage, 0) for storage in storages)
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        is_drawn = is_drawn or not storages.isdisjoint(self._drawn)
        if func is _CONVOLUTION:
            reach = _reach(self.labels_of(arguments["input"]), arguments)
            if reach and is_drawn:
                raise PositionsMixedError(f"{func} after random numbers")
            halo += reach
        for tensor in _tensors(out):
            self._halos[_storage(tensor)] = max(halo, self._halos.get(_storage(tensor), 0))
            if is_drawn:
                self._drawn.add(_storage(tensor))


# --- Where the axes go, by kind of operator ---


def _aligned(follower: _Follower, arguments: _Arguments, out: torch.Tensor) -> Labels:
    """Line operands up by their last dimensions, as broadcasting does."""
    return _broadcast(_labelled_shapes(follower, _tensors(arguments)), out.dim())


def _along_dims(follower: _Follower, arguments: _Arguments, out: torch.Tensor) -> Labels:
    """Let an operator work along the dimensions that it names, which must be no positions."""
    operands = [tensor for tensor in _tensors(arguments) if any(follower.labels_of(tensor))]
    first = operands[0]
    worked_on = _named_dims(arguments.get("dim"), first.dim())
    # Sizes along these dimensions may differ (concatenation); they carry no axes.
    shapes = [
        (follower.labels_of(tensor), [1 if d in worked_on else n for d, n in enumerate(tensor.shape)])
        for tensor in _tensors(arguments)
    ]
    labels = _broadcast(shapes, first.dim())
    if any(labels[dim] for dim in worked_on):
        raise PositionsMixedError("an operator works along positions")
    if out.dim() == first.dim():
        return labels
    return tuple(label for dim, label in enumerate(labels) if dim not in worked_on)


def _normalised(follower: _Follower, arguments: _Arguments, out: torch.Tensor) -> Labels:
    """Normalise over the last dimensions, which must be no positions."""
    labels = follower.labels_of(arguments["input"])
    num_normalised = len(arguments["normalized_shape"])
    affine = [arguments.get(name) for name in ("weight", "bias")]
    if any(labels[-num_normalised:]) or any(
        any(follower.labels_of(tensor)) for tensor in affine if tensor is not None
    ):
        raise PositionsMixedError("a normalisation over positions")
    return labels


def _multiplied(follower: _Follower, arguments: _Arguments, out: torch.Tensor) -> Labels:
    """Multiply matrices: rows of one or columns of the other may be positions, not what is summed."""
    names = ("mat1", "mat2") if "mat1" in arguments else ("self", "mat2")
    names = ("batch1", "batch2") if "batch1" in arguments else names
    left, right = (follower.labels_of(arguments[name]) for name in names)
    if any(left[:-2]) or any(right[:-2]) or left[-1] or right[-2] or (left[-2] and right[-1]):
        raise PositionsMixedError("a matrix product over positions")
    labels = (*left[:-2], left[-2], right[-1])
    if "self" not in names and any(follower.labels_of(arguments["self"])):
        added = _labelled_shapes(follower, [arguments["self"]])
        return _broadcast([*added, (labels, out.shape)], out.dim())
    return labels


def _convolved(follower: _Follower, arguments: _Arguments, out: torch.Tensor) -> Labels:
    """Convolve: see _reach for what is asked of it along positions."""
    labels = follower.labels_of(arguments["input"])
    others = [arguments["weight"], arguments["bias"]]
    if labels[1] or any(any(follower.labels_of(t)) for t in others if t is not None):
        raise PositionsMixedError("a convolution that sums over positions")
    return labels


def _viewed(follower: _Follower, arguments: _Arguments, out: torch.Tensor) -> Labels:
    """Merge and split dimensions, as far as positions stay among themselves."""
    tensor = arguments["self"]
    labels = follower.labels_of(tensor)
    result: list[Axes] = [()] * out.dim()
    for dims, new_dims in _groups(tensor.shape, out.shape):
        axes = [axis for dim in dims for axis in labels[dim]]
        if math.prod(tensor.shape[d] for d in dims) != _size(axes, follower) and axes:
            raise PositionsMixedError("a view that merges positions with other dimensions")
        for dim in new_dims if axes else ():
            taken: list[int] = []
            while axes and _size(taken, follower) < out.shape[dim]:
                taken.append(axes.pop(0))
            if _size(taken, follower) != out.shape[dim]:
                raise PositionsMixedError("a view that cuts positions apart")
            result[dim] = tuple(taken)
    return tuple(result)


def _expanded(follower: _Follower, arguments: _Arguments, out: torch.Tensor) -> Labels:
    """Repeat along dimensions of size 1, which are no positions."""
    return _broadcast(_labelled_shapes(follower, [arguments["self"]]), out.dim())


def _moved(follower: _Follower, arguments: _Arguments, out: torch.Tensor) -> Labels:
    """Reorder dimensions."""
    labels = follower.labels_of(arguments["self"])
    if "dims" in arguments:
        return tuple(labels[dim] for dim in arguments["dims"])
    order = list(range(len(labels)))
    first, second = arguments.get("dim0", 0), arguments.get("dim1", 1)
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return tuple(labels[dim] for dim in order)


def _like(follower: _Follower, arguments: _Arguments, out: torch.Tensor) -> Labels:
    """Make a tensor of the same shape."""
    return follower.labels_of(arguments["self"])


# --- Small steps of the rules ---


def _broadcast(operands: Iterable[tuple[Labels, Sequence[int]]], num_dims: int) -> Labels:
    """Give the axes of what is broadcast together.

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


def _reach(labels: Labels, arguments: _Arguments) -> int:
    """Give how far a convolution reaches along positions to either side.

    Raises:
        PositionsMixedError: if its output has not the positions of its input.
    """
    kernel = arguments["weight"].shape[2:]
    reach = 0
    for index, size in enumerate(kernel):
        if not labels[index + 2]:
            continue
        stride, padding, dilation = (
            values[index] if len(values) > 1 else values[0]
            for values in (arguments[name] for name in ("stride", "padding", "dilation"))
        )
        if arguments["transposed"] or stride != 1 or 2 * padding != dilation * (size - 1):
            raise PositionsMixedError("a convolution whose output has other positions")
        reach += int(padding)
    return reach


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


def _size(axes: Iterable[int], follower: _Follower) -> int:
    return math.prod(follower.extents[axis] for axis in axes)


def _labelled_shapes(
    follower: _Follower, tensors: Iterable[torch.Tensor]
) -> list[tuple[Labels, Sequence[int]]]:
    return [(follower.labels_of(tensor), tensor.shape) for tensor in tensors]


def _named_dims(dim: Any, num_dims: int) -> set[int]:
    """Read a ``dim`` argument; none at all means every dimension."""
    if dim is None or dim == []:
        return set(range(num_dims))
    return {each % num_dims for each in ([dim] if isinstance(dim, int) else dim)}


def _named(func: Any, args: tuple[Any, ...], kwargs: _Arguments) -> _Arguments:
    """Name an operator's arguments, with the defaults of those that were left out."""
    schema = func._schema.arguments
    named = {argument.name: argument.default_value for argument in schema}
    named.update(zip((argument.name for argument in schema), args, strict=False))
    return {**named, **kwargs}


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(dict(values) if isinstance(values, Mapping) else values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _dims(tensor: torch.Tensor) -> range:
    return range(tensor.dim())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


_ATEN = torch.ops.aten
_CONVOLUTION = _ATEN.convolution.default
_Rule = Callable[[_Follower, _Arguments, torch.Tensor], Labels]


def _rules() -> Iterator[tuple[_Rule, str]]:
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


_RULES: Mapping[str, _Rule] = {name: rule for rule, names in _rules() for name in names.split()}


def _rule_of(func: Any) -> _Rule | None:
    """Find the rule of an operator; None if nothing is known of it."""
    if torch.Tag.pointwise in func.tags:
        return _aligned
    return _RULES.get(func.overloadpacket.__name__)
