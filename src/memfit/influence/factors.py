"""Per-sample gradients of a parameter, kept as factors where they have them.

A parameter is seen as a matrix of R rows (its first dimension) and C columns (all others). Shape
suffixes: B samples, T terms of a sample's gradient (tokens, positions), R rows, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class StreamedLeft(Protocol):
    """The left factor (B, 1, R) of a scoring layer, made piece by piece where it is asked for."""

    @property
    def num_samples(self) -> int:
        """Return B."""
        ...

    @property
    def num_rows(self) -> int:
        """Return R."""
        ...

    def block(self, start: int, stop: int) -> Tensor:
        """Make the entries of some rows: (B, 1, stop - start)."""
        ...

    def take(self, rows: Tensor) -> Tensor:
        """Make the entries of single rows (n,) int64: (B, 1, n)."""
        ...

    def take_own(self, rows: Tensor) -> Tensor:
        """Make for each sample the entries of its own rows (B, T) int64: (B, 1, T)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outer:
    """Gradients that are sums of outer products: ``G[b] = sum_t left[b, t] right[b, t]^T``."""

    left: Tensor | StreamedLeft
    """(B, T, R), or what makes its pieces."""
    right: Tensor | None
    """(B, T, C); None means a single column of ones, as a bias has it."""

    @property
    def num_samples(self) -> int:
        """Return B."""
        return len(self.left) if isinstance(self.left, Tensor) else self.left.num_samples

    @property
    def num_terms(self) -> int:
        """Return T."""
        return self.left.shape[1] if isinstance(self.left, Tensor) else 1

    @property
    def num_rows(self) -> int:
        """Return R."""
        return self.left.shape[2] if isinstance(self.left, Tensor) else self.left.num_rows

    @property
    def num_columns(self) -> int:
        """Return C."""
        return 1 if self.right is None else self.right.shape[2]

    def left_block(self, start: int, stop: int) -> Tensor:
        """Return some rows of the left factor: (B, T, stop - start)."""
        if isinstance(self.left, Tensor):
            return self.left[:, :, start:stop]
        return self.left.block(start, stop)

    def take(self, rows: Tensor) -> Tensor:
        """Return single rows of the left factor: (n,) int64 to (B, T, n)."""
        return self.left[:, :, rows] if isinstance(self.left, Tensor) else self.left.take(rows)

    def take_own(self, rows: Tensor) -> Tensor:
        """Return for each sample its own rows of the left factor: (B, S) int64 to (B, T, S)."""
        if isinstance(self.left, Tensor):
            index = rows[:, None, :].expand(-1, self.num_terms, -1)
            return self.left.gather(2, index)
        return self.left.take_own(rows)

    def block(self, start: int, stop: int) -> Tensor:
        """Make some rows of the gradients: (B, stop - start, C)."""
        left = self.left_block(start, stop).transpose(1, 2)
        return left.sum(dim=2, keepdim=True) if self.right is None else torch.bmm(left, self.right)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookup:
    """Gradients of rows that were looked up: row ``indices[b, t]`` gets ``values[b, t]``."""

    indices: Tensor
    """(B, T) int64."""
    values: Tensor
    """(B, T, C)."""
    num_rows: int

    @property
    def num_samples(self) -> int:
        """Return B."""
        return len(self.indices)

    @property
    def num_terms(self) -> int:
        """Return T."""
        return self.indices.shape[1]

    @property
    def num_columns(self) -> int:
        """Return C."""
        return self.values.shape[2]

    def block(self, start: int, stop: int) -> Tensor:
        """Make some rows of the gradients: (B, stop - start, C)."""
        is_outside = (self.indices < start) | (self.indices >= stop)
        # One more row takes what lies outside, so that no entry needs a mask.
        place = (self.indices - start).masked_fill(is_outside, stop - start)
        shape = (self.num_samples, stop - start + 1, self.num_columns)
        made = self.values.new_zeros(shape)
        made.scatter_add_(1, place[:, :, None].expand_as(self.values), self.values)
        return made[:, :-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dense:
    """Gradients as they are."""

    value: Tensor
    """(B, R, C)."""

    @property
    def num_samples(self) -> int:
        """Return B."""
        return len(self.value)

    @property
    def num_rows(self) -> int:
        """Return R."""
        return self.value.shape[1]

    @property
    def num_columns(self) -> int:
        """Return C."""
        return self.value.shape[2]

    def block(self, start: int, stop: int) -> Tensor:
        """Return some rows of the gradients: (B, stop - start, C)."""
        return self.value[:, start:stop]


Factor = Outer | Lookup | Dense
"""The gradients of B samples by one use of a parameter."""


def outer(left: Tensor, right: Tensor) -> Outer | Dense:
    """Keep outer products as factors (B, T, R) and (B, T, C), or as (B, R, C) where it is smaller.

    Where it is smaller its inner products take fewer operations as well: R C for each pair of
    samples, where pairs of terms take T^2 (R + C).
    """
    num_terms, num_rows, num_columns = *left.shape[1:], right.shape[2]
    if num_terms > 1 and num_rows * num_columns <= num_terms * (num_rows + num_columns):
        return Dense(value=torch.bmm(left.transpose(1, 2), right))
    return Outer(left=left, right=right)


def dense(value: Tensor, shape: tuple[int, ...]) -> Dense:
    """Keep gradients (B, ...) of a parameter with its shape as matrices."""
    num_rows = shape[0] if shape else 1
    return Dense(value=value.reshape(len(value), num_rows, -1))


def in_type(factor: Factor, dtype: torch.dtype) -> Factor:
    """Return a factor in the type of its parameter, as autograd converts gradients back.

    Sums over terms and inner products would lose what 16-bit numbers cannot tell apart.
    """
    match factor:
        case Dense():
            return Dense(value=factor.value.to(dtype))
        case Lookup():
            return Lookup(
                indices=factor.indices, values=factor.values.to(dtype), num_rows=factor.num_rows
            )
    right = None if factor.right is None else factor.right.to(dtype)
    left = factor.left.to(dtype) if isinstance(factor.left, Tensor) else factor.left
    return Outer(left=left, right=right)
