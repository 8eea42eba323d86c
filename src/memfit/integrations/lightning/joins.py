"""Ways to put what pieces have logged together to the value of the batch, and which of them hold.

A loss is a mean over samples, a perplexity the exponential of one, a number of hits a sum. Which it
is, is tried: a few samples are run whole and in uneven pieces, and ways that do not give the value
of the whole are given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Key = tuple[str, str, int]
"""A hook, the name it logs under, and how many it has logged under that name before."""
_MOST_TRIALS = 8


@dataclass(frozen=True, slots=True)
class Pieces:
    """One value, as the pieces of a batch logged it."""

    values: Sequence[Any]
    counts: Mapping[str, Sequence[Any]]
    """How much pieces count: by ``samples``, by ``terms`` of the loss, by ``sizes`` given."""

    def mean(self, by: str, inner: Callable[[Any], Any] = lambda value: value) -> Any:
        """Return a mean over pieces; those that count nothing are left out."""
        counts = self.counts[by]
        total = sum(counts)
        pairs = zip(self.values, counts, strict=True)
        return sum(inner(value) * (count / total) for value, count in pairs if count)

    @property
    def is_constant(self) -> bool:
        """Return whether a plain number is the same in all pieces."""
        first = self.values[0]
        return not isinstance(first, torch.Tensor) and all(each == first for each in self.values)


@dataclass(frozen=True, slots=True)
class Join:
    """One way: ``mean``, ``sum``, ``min``, ``max``, or a function of a mean."""

    way: str
    by: str = ""
    """What pieces count by in a mean."""

    def __call__(self, pieces: Pieces) -> Any:
        """Return the value of the batch."""
        if pieces.is_constant and self.way != "sum":
            return pieces.values[0]
        if self.way in _EXTREMES:
            return _EXTREMES[self.way](pieces.values)
        outer, inner = _FUNCTIONS[self.way]
        return outer(pieces.mean(self.by, inner))


def _same(value: Any) -> Any:
    return value


def _exponential(value: Any) -> Any:
    return torch.as_tensor(value).exp()


def _logarithm(value: Any) -> Any:
    return torch.as_tensor(value).log()


_EXTREMES: dict[str, Callable[[Any], Any]] = {"sum": sum, "min": min, "max": max}
_FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "mean": (_same, _same),
    "exponential": (_exponential, _logarithm),
    "root": (lambda value: torch.as_tensor(value).sqrt(), lambda value: value * value),
    "logarithm": (_logarithm, _exponential),
}
"""Functions that are taken of a mean, and what undoes them in a piece."""


def default_join(reduction: Any, counts: Mapping[str, Any]) -> Join:
    """Return how a value is put together as long as nothing is known of it.

    As steps are over an epoch: by the reduction that ``self.log`` is told.
    """
    name = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if name.lower() in _EXTREMES:
        return Join(name.lower())
    return Join("mean", next(by for by in ("terms", "sizes", "samples") if by in counts))


def _all_joins(counts: Mapping[str, Any]) -> list[Join]:
    means = [Join(way, by) for way in _FUNCTIONS for by in counts]
    return [*means, *map(Join, _EXTREMES)]


@dataclass(slots=True)
class Found:
    """What trials have shown of one logged value."""

    joins: list[Join] | None = None
    """Ways that have held so far; None before the first trial."""
    num_trials: int = 0
    sizes_add_up: bool = True
    """Whether the ``batch_size`` that is given follows the samples; else it is a constant."""

    @property
    def is_settled(self) -> bool:
        """Return whether there is nothing left to be found out."""
        return self.num_trials >= _MOST_TRIALS or (self.joins is not None and len(self.joins) < 2)

    def take(self, whole: Any, pieces: Pieces, tolerance: float) -> None:
        """Give up the ways that do not give the value of a whole batch."""
        self.num_trials += 1
        if not math.isfinite(float(whole)):
            return  # a batch without what is measured tells nothing
        joins = _all_joins(pieces.counts) if self.joins is None else self.joins
        numbers = [abs(float(each)) for each in (whole, *pieces.values)]
        bound = tolerance * max(each for each in numbers if math.isfinite(each))
        self.joins = [each for each in joins if _is_close(each(pieces), whole, bound)]

    def best(self, default: Join) -> Join:
        """Return how the value is put together."""
        if not self.joins or default in self.joins:
            return default
        return self.joins[0]


def _is_close(one: Any, other: Any, bound: float) -> bool:
    one, other = float(one), float(other)
    return one == other or (math.isfinite(one) and abs(one - other) <= bound)


@dataclass(slots=True)
class KnownJoins:
    """What is known of all that a module logs."""

    found: dict[Key, Found] = field(default_factory=dict)

    def of(self, key: Key) -> Found:
        """Return what is known of one value."""
        return self.found.setdefault(key, Found())

    @property
    def failed(self) -> list[str]:
        """Name what no way gives: what is logged of it is a mean over pieces."""
        return sorted({key[1] for key, each in self.found.items() if each.joins == []})
