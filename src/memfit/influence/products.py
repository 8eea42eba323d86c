"""Inner products of per-sample gradients from their factors; the gradients are not made.

With ``G = sum_t l_t r_t^T`` and ``H = sum_s m_s q_s^T`` the inner product is
``<G, H> = sum_ts (l_t . m_s)(r_t . q_s)``, so two samples of a linear layer need its inputs and
output gradients alone. Where many terms make that dearer than the gradients themselves, these are
made for a block of rows at a time.

Shape suffixes: X samples on one side, Y on the other, T and S their terms, R rows, C columns.

Source: the identity for linear layers, Goodfellow 2015 (arXiv 1510.01799); over sequences, Li et
al. 2022 (arXiv 2110.05679), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memfit.units import MIB

from .factors import Dense, Factor, Lookup, Outer

DEFAULT_LIMIT_BYTES = 16 * MIB
"""How large what is made for a moment may become."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """Inner products of factors, with a bound on what is made for a moment."""

    limit_bytes: int = DEFAULT_LIMIT_BYTES
    _lefts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Products of left factors by identity: the weight and the bias of a layer share them. It
    holds while both sides live, so an object serves one pair of sides."""

    def between(self, x: Factor, y: Factor) -> Tensor:
        """Return the inner products of all pairs, (X, Y)."""
        match x, y:
            case Outer(), Outer() if x.num_terms * y.num_terms == 1:
                return self._one_term_each(x, y)
            case Outer(), Outer() if _pairs_cost(x, y) <= _blocks_cost(x, y):
                return self._term_pairs(x, y)
            case Lookup(), Lookup() if x.num_terms * y.num_terms <= x.num_rows:
                return self._two_lookups(x, y)
            case Lookup(), Outer():
                return self._lookup_and_outer(x, y)
            case Outer(), Lookup():
                return self._lookup_and_outer(y, x).t()
            case Dense(), Dense():
                return x.value.flatten(1) @ y.value.flatten(1).t()
        found_XY = None
        for start, stop in self._row_blocks(x, y):
            # Not by names, which would keep these blocks beside the next ones.
            found_XY = _plus_product(
                found_XY, x.block(start, stop).flatten(1), y.block(start, stop).flatten(1)
            )
        assert found_XY is not None, "a parameter has rows"
        return found_XY

    def paired(self, x: Factor, y: Factor) -> Tensor:
        """Return the inner product of each sample's gradient in x with its own in y, (X,)."""
        match x, y:
            case Outer(), Outer() if x.num_terms * y.num_terms == 1:
                right_X = _rights(x) * _rights(y)
                return self._paired_lefts(x, y) * right_X.sum(dim=1)
            case Lookup(), Lookup():
                is_same_XTS = x.indices[:, :, None] == y.indices[:, None, :]
                return (torch.bmm(x.values, y.values.mT) * is_same_XTS).sum(dim=(1, 2))
            case Lookup(), Outer():
                return _paired_lookup(x, y)
            case Outer(), Lookup():
                return _paired_lookup(y, x)
        found_X = None
        for start, stop in self._row_blocks(x, y):
            part_X = (x.block(start, stop) * y.block(start, stop)).sum(dim=(1, 2))
            found_X = part_X if found_X is None else found_X.add_(part_X)
        assert found_X is not None, "a parameter has rows"
        return found_X

    def _one_term_each(self, x: Outer, y: Outer) -> Tensor:
        key = (id(x.left), id(y.left))
        left_XY = self._lefts.get(key)
        if left_XY is None:
            for start, stop in self._left_blocks(x, y):
                left_XY = _plus_product(
                    left_XY, x.left_block(start, stop)[:, 0], y.left_block(start, stop)[:, 0]
                )
            assert left_XY is not None, "a parameter has rows"
            self._lefts[key] = left_XY
        if x.right is None and y.right is None:
            return left_XY
        return left_XY * (_rights(x) @ _rights(y).t())

    def _paired_lefts(self, x: Outer, y: Outer) -> Tensor:
        left_X = None
        for start, stop in self._left_blocks(x, y):
            part_X = (x.left_block(start, stop) * y.left_block(start, stop)).sum(dim=(1, 2))
            left_X = part_X if left_X is None else left_X.add_(part_X)
        assert left_X is not None, "a parameter has rows"
        return left_X

    def _term_pairs(self, x: Outer, y: Outer) -> Tensor:
        """Sum over pairs of terms, a chunk of samples of both sides at a time."""

        def of(x_rows: slice, y_rows: slice) -> Tensor:
            made = x.left_block(0, x.num_rows)[x_rows].flatten(0, 1) @ (
                y.left_block(0, y.num_rows)[y_rows].flatten(0, 1).t()
            )
            if x.right is not None and y.right is not None:
                made *= x.right[x_rows].flatten(0, 1) @ y.right[y_rows].flatten(0, 1).t()
            return made

        return self._over_pairs(x, y, of)

    def _two_lookups(self, x: Lookup, y: Lookup) -> Tensor:
        """Sum over pairs of terms that looked the same row up."""

        def of(x_rows: slice, y_rows: slice) -> Tensor:
            made = x.values[x_rows].flatten(0, 1) @ y.values[y_rows].flatten(0, 1).t()
            is_same = x.indices[x_rows].flatten()[:, None] == y.indices[y_rows].flatten()
            return made.mul_(is_same)

        return self._over_pairs(x, y, of)

    def _over_pairs(
        self, x: Outer | Lookup, y: Outer | Lookup, of: Callable[[slice, slice], Tensor]
    ) -> Tensor:
        """Sum what is made for all pairs of terms of some samples, (X T, Y S), to (X, Y)."""
        num_terms = x.num_terms * y.num_terms
        num_pairs = max(1, self._limit_numbers(x) // (2 * num_terms))
        num_y = min(y.num_samples, num_pairs)
        num_x = max(1, num_pairs // num_y)
        rows = []
        for x_rows in _slices(x.num_samples, num_x):
            parts = []
            for y_rows in _slices(y.num_samples, num_y):
                made = of(x_rows, y_rows).unflatten(1, (-1, y.num_terms)).sum(dim=2)
                parts.append(made.unflatten(0, (-1, x.num_terms)).sum(dim=1))
            rows.append(torch.cat(parts, dim=1))
        return torch.cat(rows)

    def _lookup_and_outer(self, x: Lookup, y: Outer) -> Tensor:
        """Take the rows that were looked up out of the left factor: (X, Y)."""
        num_each = y.num_samples * y.num_terms * x.num_terms
        num_x = max(1, self._limit_numbers(x) // (2 * num_each))
        found = []
        for rows in _slices(x.num_samples, num_x):
            values_NC = x.values[rows].flatten(0, 1)
            left_YSN = y.take(x.indices[rows].flatten())
            if y.right is None:
                right_YSN = values_NC.sum(dim=1)
            else:
                right_YSN = torch.matmul(y.right, values_NC.t())
            made_YN = (left_YSN * right_YSN).sum(dim=1)
            found.append(made_YN.unflatten(1, (-1, x.num_terms)).sum(dim=2).t())
        return torch.cat(found)

    def _row_blocks(self, x: Factor, y: Factor) -> Iterator[tuple[int, int]]:
        num_each = (x.num_samples + y.num_samples) * x.num_columns
        return block_bounds(x.num_rows, max(1, self._limit_numbers(x) // num_each))

    def _left_blocks(self, x: Outer, y: Outer) -> Iterator[tuple[int, int]]:
        if isinstance(x.left, Tensor) and isinstance(y.left, Tensor):
            return iter([(0, x.num_rows)])
        # A piece of scores takes a second one for a moment.
        num_each = 2 * (x.num_samples + y.num_samples)
        return block_bounds(x.num_rows, max(1, self._limit_numbers(x) // num_each))

    def _limit_numbers(self, x: Factor) -> int:
        return self.limit_bytes // _item_bytes(x)


def _pairs_cost(x: Outer, y: Outer) -> int:
    """Return the multiplications that pairs of terms take."""
    num_pairs = x.num_samples * y.num_samples * x.num_terms * y.num_terms
    return num_pairs * (x.num_rows + x.num_columns)


def _blocks_cost(x: Outer, y: Outer) -> int:
    """Return the multiplications that gradients made by blocks take."""
    num_terms = x.num_samples * x.num_terms + y.num_samples * y.num_terms
    return (num_terms + x.num_samples * y.num_samples) * x.num_rows * x.num_columns


def _paired_lookup(x: Lookup, y: Outer) -> Tensor:
    """Return the inner products of each sample's looked-up rows with its own outer products."""
    left_XST = y.take_own(x.indices)
    if y.right is None:
        return (left_XST * x.values.sum(dim=2)[:, None]).sum(dim=(1, 2))
    return (left_XST * torch.bmm(y.right, x.values.mT)).sum(dim=(1, 2))


def _rights(x: Outer) -> Tensor:
    """Return the right factors of single terms, (X, C)."""
    if x.right is not None:
        return x.right[:, 0]
    probe = x.left_block(0, 1)
    return torch.ones_like(probe[:, 0])


def _plus_product(sum_XY: Tensor | None, x_XN: Tensor, y_YN: Tensor) -> Tensor:
    return x_XN @ y_YN.t() if sum_XY is None else sum_XY.addmm_(x_XN, y_YN.t())


def _item_bytes(x: Factor) -> int:
    match x:
        case Dense():
            return x.value.element_size()
        case Lookup():
            return x.values.element_size()
    held = x.left if isinstance(x.left, Tensor) else x.left_block(0, 1)
    return held.element_size()


def _slices(total: int, num_each: int) -> Iterator[slice]:
    for start, stop in block_bounds(total, num_each):
        yield slice(start, stop)


def block_bounds(total: int, num_each: int) -> Iterator[tuple[int, int]]:
    """Yield where pieces of so many begin and end."""
    for start in range(0, total, num_each):
        yield start, min(start + num_each, total)
