"""One use of an operator at two batch sizes, as a rule sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from memfit.analysis.dataflow import Call, Dataflow, Ref, Shape, refs_in
from memfit.analysis.flow import FREE, Axes, Axis, Flow, Kind
from memfit.analysis.separability import NeverHolds


class CoupledError(Exception):
    """Say in which way an operator brings samples together."""


class NotFollowedError(Exception):
    """Say why nothing is known of what an operator does with samples."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The two batch sizes at which a step was recorded."""

    first: int
    second: int

    @property
    def shrink(self) -> float:
        """Return how a mean over the batch changes: N / M."""
        return self.first / self.second


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a walk takes for granted.

    Attributes:
        statistics: modules, by name, whose batch normalisation gets those of the whole batch.
        all_labels_count: labels of the batch never equal a negative number that code compares them
            with; becomes a condition of the proof.
    """

    statistics: frozenset[str] = frozenset()
    all_labels_count: bool = False


NOTHING_GIVEN = Given()


class Use:
    """One call of an operator, recorded at both sizes, with what is known of its operands.

    Args:
        calls: at the first size, and the same at the second size.
        recordings: of the step, at both sizes.
        flow_of: what is known of a tensor.
        sizes: the batch sizes.
    """

    def __init__(
        self,
        calls: tuple[Call, Call],
        recordings: tuple[Dataflow, Dataflow],
        flow_of: Callable[[Ref], Flow],
        sizes: Sizes,
    ) -> None:
        self.call, self.other = calls
        self._shapes, self._other_shapes = (each.shapes for each in recordings)
        self.other_of: Mapping[int, int] = {}
        """The second recording's tensor for each of the first one's."""
        self._flow_of = flow_of
        self.sizes = sizes
        self._names = argument_names(self.call.func)
        self.given = NOTHING_GIVEN
        self.relied_on: list[NeverHolds] = []
        """What the batch must keep to for a rule to hold."""

    def seeing(self, flow_of: Callable[[Ref], Flow]) -> Use:
        """Return the same use with something else known of its tensors."""
        found = copy(self)
        found._flow_of = flow_of
        return found

    @property
    def name(self) -> str:
        """Return the operator's name without its overload: ``add``, ``add_``."""
        return operator_name(self.call.func)

    @property
    def gets_statistics(self) -> bool:
        """Return whether it runs in a module that gets its statistics."""
        return self.call.place.module in self.given.statistics

    @property
    def tensors(self) -> list[Ref]:
        """List the operator's tensors, in order."""
        return list(refs_in(self.call.arguments))

    @property
    def flows(self) -> list[Flow]:
        """List what is known of the operator's tensors."""
        return [self._flow_of(ref) for ref in self.tensors]

    def has(self, name: str) -> bool:
        """Return whether the operator has an argument of that name."""
        return name in self._names

    def argument(self, name: str) -> Any:
        """Return an argument at the first size; None where the operator has none of that name."""
        place = self._names.get(name)
        return None if place is None else self.call.arguments[place]

    def arguments(self, name: str) -> tuple[Any, Any]:
        """Return an argument at both sizes."""
        place = self._names[name]
        return self.call.arguments[place], self.other.arguments[place]

    def flow(self, name: str) -> Flow | None:
        """Return what is known of a tensor argument; None where there is none."""
        value = self.argument(name)
        return self._flow_of(value) if isinstance(value, Ref) else None

    def known(self, *names: str) -> list[Flow]:
        """List what is known of tensor arguments that the operator always has."""
        return [self._flow_of(self.argument(name)) for name in names]

    def flow_of(self, ref: Ref) -> Flow:
        """Return what is known of a tensor."""
        return self._flow_of(ref)

    def size_of(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of a tensor at the first size."""
        return self._shapes[ref.number].sizes

    def shape_of(self, ref: Ref) -> Shape:
        """Return shape and layout of a tensor at the first size."""
        return self._shapes[ref.number]

    def other_size_of(self, ref: Ref) -> tuple[int, ...]:
        """Return the shape of a tensor at the second size."""
        return self._other_shapes[self.other_of[ref.number]].sizes

    def size(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor argument at the first size."""
        return self.size_of(self.argument(name))

    def result_size(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of a result at the first size."""
        return self.size_of(self.call.results[index])

    def rely_on(self, leaves: Iterable[int], value: int) -> None:
        """Take for granted that some leaves of the batch never hold a value."""
        self.relied_on += [NeverHolds(leaf=leaf, value=value) for leaf in leaves]

    def opaque(self, flow: Flow) -> Flow:
        """Return what is known of a result that only the operator's own backward understands."""
        return replace(flow, is_opaque=True)

    def varying_axes(self, ref: Ref) -> Axes:
        """Find the dimensions that follow the batch size, as wild axes.

        Raises:
            NotFollowedError: if a dimension follows it in another way than by a whole multiple.
        """
        return tuple(
            self._varying(one, other)
            for one, other in zip(self.size_of(ref), self.other_size_of(ref), strict=True)
        )

    def _varying(self, one: int, other: int) -> Axis | None:
        if one == other:
            return None
        count, rest = divmod(one, self.sizes.first)
        if rest or count * self.sizes.second != other:
            raise NotFollowedError("gives a shape that is no multiple of the batch size")
        return Axis(outer=1, inner=count, wild=True)


@cache
def argument_names(func: Any) -> dict[str, int]:
    """Return the places of an operator's arguments by name."""
    return {argument.name: place for place, argument in enumerate(func._schema.arguments)}


@cache
def operator_name(func: Any) -> str:
    """Return an operator's name without namespace and overload."""
    return str(func._schema.name).rpartition("::")[2]


def free(num_dims: int, ratio: float = 1.0) -> Flow:
    """Return a tensor that does not depend on the batch."""
    return Flow(kind=Kind.FREE, axes=(None,) * num_dims, ratio=ratio)


__all__ = [
    "FREE",
    "CoupledError",
    "NotFollowedError",
    "Sizes",
    "Use",
    "argument_names",
    "free",
    "operator_name",
]
