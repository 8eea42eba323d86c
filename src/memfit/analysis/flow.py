"""What is known of a tensor: how its elements depend on the samples of the batch.

Every tensor of a step belongs to one of these kinds:

- FREE: it does not depend on the batch (parameters, constants).
- EACH: one of its dimensions runs over the samples, and an element depends on its sample alone.
- SUM: a sum over the samples of terms that depend on one sample each (a loss, a gradient).
- ONE: it belongs to one sample, the same way for each sample (in a loop over them).
- MIXED: it depends on the samples in any other way.
- UNKNOWN: an operator before it could not be followed.

A step is recorded at two batch sizes, N and M. ``ratio`` says how the value's scale changes with
the size: what the value at M is, divided by what the same formula gives. A mean over the batch is a
SUM with ratio N / M. What does not depend on the batch at all can be spread evenly over its
samples, so FREE with ratio r is SUM with ratio r * N / M.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from memfit.analysis.separability import Culprit

_SAME = 1e-9


class Kind(StrEnum):
    """Say how the elements of a tensor depend on the samples."""

    FREE = "free"
    EACH = "each"
    SUM = "sum"
    ONE = "one"
    MIXED = "mixed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension that runs over the samples: its extent is ``outer * N * inner``.

    The sample of index i is ``i // inner % N``. A ``wild`` axis is the same, or independently
    drawn, at every index, so that any split of its extent into outer and inner is true of it.
    """

    outer: int = 1
    inner: int = 1
    wild: bool = False

    def extent(self, num_samples: int) -> int:
        """Return the length of the dimension at a batch size."""
        return self.outer * num_samples * self.inner

    def matches(self, other: Axis) -> bool:
        """Return whether an index means the same sample on both."""
        if self.wild or other.wild:
            return self.outer * self.inner == other.outer * other.inner
        return (self.outer, self.inner) == (other.outer, other.inner)


Axes = tuple[Axis | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a tensor is mixed or not known."""

    sentence: str
    culprit: Culprit


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """What is known of one tensor.

    Attributes:
        kind: how it depends on the samples.
        axes: for EACH, which dimension runs over them; one entry per dimension.
        ratio: see the module.
        is_uniform: all elements have one value, which does not depend on the batch.
        is_positions: its elements are the positions 0, 1, 2 ... of the samples, times stride.
        stride: the length of a sample's part where positions say where it begins.
        is_opaque: only the backward of the operator that made it knows what it holds.
        is_drawn: it depends on random numbers.
        sources: the leaves of the batch that its elements are copied from, apart from what stands
            at fixed places of every sample; none if it holds no negative numbers; None if unknown.
        has_holes: there are such fixed places.
        value: the number that it holds, where it is one and is known.
        problem: for MIXED and UNKNOWN.
    """

    kind: Kind
    axes: Axes = ()
    ratio: float = 1.0
    is_uniform: bool = False
    is_positions: bool = False
    stride: int = 1
    is_opaque: bool = False
    is_drawn: bool = False
    sources: frozenset[int] | None = None
    has_holes: bool = False
    value: float | None = None
    problem: Problem | None = None

    @property
    def is_bad(self) -> bool:
        """Return whether nothing more can be said of what depends on it."""
        return self.kind in (Kind.MIXED, Kind.UNKNOWN)

    @property
    def batch_dim(self) -> int | None:
        """Return the dimension that runs over the samples."""
        return next((dim for dim, axis in enumerate(self.axes) if axis is not None), None)

    @property
    def is_zero(self) -> bool:
        """Return whether all elements are zero."""
        return self.is_uniform and self.value == 0.0

    @property
    def is_own_position(self) -> bool:
        """Return whether each element is the number of its own sample."""
        return self.is_positions and self.stride == 1

    @property
    def is_plain(self) -> bool:
        """Return whether its values are those of the same formula at every size."""
        return is_one(self.ratio)

    def with_sources(self, sources: frozenset[int]) -> Flow:
        """Return the same with its elements copied from other leaves of the batch."""
        return replace(self, sources=sources)

    def with_axes(self, axes: Axes) -> Flow:
        """Return the same with other dimensions."""
        kind = self.kind
        if kind in (Kind.EACH, Kind.FREE):
            kind = Kind.EACH if any(axes) else Kind.FREE
        return replace(self, kind=kind, axes=axes)


FREE = Flow(kind=Kind.FREE)


def samples_along(axes: Iterable[Axis | None], *flows: Flow, **known: Any) -> Flow:
    """Return what is made of some tensors, by its dimensions: EACH where one runs over samples."""
    axes, is_drawn = tuple(axes), any(flow.is_drawn for flow in flows)
    kind = Kind.EACH if any(axes) else Kind.FREE
    return Flow(kind=kind, axes=axes, **{"is_drawn": is_drawn, **known})


def sum_over_batch(num_dims: int, ratio: float, *flows: Flow) -> Flow:
    """Return a sum over the batch that is made of some tensors."""
    is_drawn = any(flow.is_drawn for flow in flows)
    return Flow(kind=Kind.SUM, axes=(None,) * num_dims, ratio=ratio, is_drawn=is_drawn)


def alike(one: Axis | None, other: Axis | None) -> bool:
    """Return whether two dimensions run over the same samples, or both over none."""
    if one is None or other is None:
        return one is other
    return one.matches(other)


def is_one(ratio: float) -> bool:
    """Return whether a ratio is one, but for rounding."""
    return math.isclose(ratio, 1.0, rel_tol=_SAME)


def same_ratio(first: float, second: float) -> bool:
    """Return whether two ratios are equal, but for rounding."""
    return math.isclose(first, second, rel_tol=_SAME)
