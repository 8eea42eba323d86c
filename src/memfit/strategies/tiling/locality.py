"""Tells from the operators of a function whether it treats the positions of a tensor apart.

A function is run on a meta tensor, which has a shape and no values. Some dimensions of its input
are axes of positions, such as tokens or rows of an image. Each operator is asked where the axes of
its operands go; one that is not known to keep positions apart ends the matter. What is left are
functions whose output at a position depends on the input there and, by convolutions, on at most
``halo`` positions to either side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.strategies.tiling.locality_rules import (
    Labels,
    OwnGeneratorError,
    PositionsMixedError,
    Use,
    has_sizes,
    is_view,
    reach_of,
    rule_of,
    tensors_of,
)
from memfit.trace.modes import OperatorMode

_CONVOLUTION = torch.ops.aten.convolution.default
_MOST_VALUES = 16
_Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """How a function treats positions.

    Attributes:
        halo: how many positions to either side an output depends on, along one axis.
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
    *,
    along: int = 0,
) -> Locality:
    """Run a function on a meta tensor and follow the positions of its input to its output.

    Args:
        function: takes the tensor, and uses no other tensors than meta tensors.
        shape: of the tensor.
        axes: the dimensions that are positions.
        fixed: tensors that the function must not change: its parameters and buffers.
        along: the axis whose halo is wanted.

    Raises:
        OwnGeneratorError: if it draws from a generator that is not torch's global one.
        PositionsMixedError: if an operator may bring positions together, if the output has not the
            positions of the input, or if a tensor is changed that must not be.
    """
    inputs = torch.empty(tuple(shape), dtype=torch.float32, device="meta")
    follower = _Follower(inputs, axes, fixed, along)
    with torch.no_grad(), follower:
        out = function(inputs)
    return follower.judged(out)


class _Follower(OperatorMode):
    """Follow the axes of positions from operator to operator."""

    def __init__(
        self,
        inputs: torch.Tensor,
        axes: Sequence[int],
        fixed: Iterable[torch.Tensor],
        along: int,
    ) -> None:
        super().__init__()
        self._axes, self._inputs, self._along = axes, inputs, along
        # Axes of one position need no following, and cannot be told from other dimensions.
        self._extents = {dim: inputs.shape[dim] for dim in axes if inputs.shape[dim] > 1}
        self._fixed = {_storage(tensor): tensor for tensor in (inputs, *fixed)}
        # Every tensor is kept, so that an address or an id means one tensor.
        self._met = dict(self._fixed)
        self._labels: dict[int, tuple[torch.Tensor, Labels]] = {}
        self._halos: dict[int, int] = {}
        self._drawn: set[int] = set()
        self._calls: list[tuple[Any, ...]] = []
        self._num_steps = 0
        labels = tuple((dim,) if dim in self._extents else () for dim in range(inputs.dim()))
        self._labels[id(inputs)] = (inputs, labels)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        schema = func._schema.arguments
        named = {argument.name: argument.default_value for argument in schema}
        named.update(zip((argument.name for argument in schema), args, strict=False))
        arguments = {**named, **kwargs}
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if is_drawn and arguments.get("generator") is not None:
            raise OwnGeneratorError
        out = func(*args, **kwargs)
        operands = tensors_of(arguments)
        self._refuse_changes(func, arguments)
        self._note_foreign(operands)
        self._met.update((_storage(tensor), tensor) for tensor in tensors_of(out))
        labelled = [tensor for tensor in operands if any(self._labels_of(tensor))]
        rule = rule_of(func)
        # What all positions share may be anything, but not drawn anew for every tile.
        if (labelled and rule is None) or (is_drawn and not labelled):
            raise PositionsMixedError(str(func))
        if not (labelled and rule and has_sizes(rule)):
            # The numbers that an operator is given must not depend on the extents.
            numbers = tuple(
                value for value in tree_leaves(dict(arguments)) if isinstance(value, (int, float))
            )
            self._calls.append((str(func), *numbers))
        if labelled and rule:
            self._num_steps += not is_view(rule)
            uses = [
                Use(arguments=arguments, out=each, labels_of=self._labels_of, extents=self._extents)
                for each in tensors_of(out)
            ]
            self._spread(func, uses, is_drawn=is_drawn)
            for use in uses:
                self._labels[id(use.out)] = (use.out, rule(use))
        return out

    def _labels_of(self, tensor: torch.Tensor) -> Labels:
        """Return the axes of a tensor's dimensions."""
        known = self._labels.get(id(tensor))
        return known[1] if known else ((),) * tensor.dim()

    def judged(self, out: Any) -> Locality:
        """Return how the function treats positions, now that its output is known."""
        if not isinstance(out, torch.Tensor) or out.dim() != self._inputs.dim():
            raise PositionsMixedError("its output is no tensor with the dimensions of its input")
        labels = self._labels_of(out)
        before = self._labels_of(self._inputs)
        if any(
            labels[dim] != before[dim] or out.shape[dim] != self._inputs.shape[dim]
            for dim in self._axes
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

    def _note_foreign(self, operands: Iterable[torch.Tensor]) -> None:
        """Keep the values of tensors that come from no operator, such as a number of tokens.

        Raises:
            PositionsMixedError: if they are not at hand.
        """
        for tensor in operands:
            if _storage(tensor) in self._met:
                continue
            if tensor.device.type != "cpu" or tensor.numel() > _MOST_VALUES:
                raise PositionsMixedError("a tensor whose values are not known comes from outside")
            self._calls.append(("values", *tensor.flatten().tolist()))
            self._met[_storage(tensor)] = tensor

    def _refuse_changes(self, func: Any, arguments: _Arguments) -> None:
        """Refuse operators that write into the input, a parameter or a buffer."""
        for argument in func._schema.arguments:
            written = argument.alias_info is not None and argument.alias_info.is_write
            value = arguments.get(argument.name)
            if written and isinstance(value, torch.Tensor) and _storage(value) in self._fixed:
                raise PositionsMixedError(f"{func} changes the input, a parameter or a buffer")

    def _spread(self, func: Any, uses: Sequence[Use], *, is_drawn: bool) -> None:
        """Pass halo and randomness on, by storage: what is changed in place is seen by all views.

        Raises:
            PositionsMixedError: if a convolution reads random numbers of other positions: tiles
                that overlap would draw them twice.
        """
        for use in uses:
            storages = {_storage(tensor) for tensor in tensors_of(use.arguments)}
            halo = max(self._halos.get(storage, 0) for storage in storages)
            is_random = is_drawn or not storages.isdisjoint(self._drawn)
            reach = reach_of(use, self._along) if func is _CONVOLUTION else 0
            if reach and is_random:
                raise PositionsMixedError(f"{func} after random numbers")
            target = _storage(use.out)
            self._halos[target] = max(halo + reach, self._halos.get(target, 0))
            if is_random:
                self._drawn.add(target)


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
