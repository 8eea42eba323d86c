"""Gives the sizes of a step's blocks for batches of any shape, from a few recorded ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import prod
from typing import Any

import numpy as np

from memfit.script.scanned_data import ScannedData
from memfit.script.step_templates import Passing, StepTemplate
from memfit.session.batch_shapes import BatchShape

_MOST_LENGTHS = 2
"""Lengths that vary by themselves and are followed; a square in three takes ten recorded steps."""
_Array = np.ndarray[Any, np.dtype[Any]]

Key = tuple[int, int, str, int]
"""Of blocks that pass: where, as which of those at that place, of which operator, how many."""
RECORDED, FITTED, NEAREST, BEYOND = "recorded", "fitted", "nearest larger", "larger than recorded"
_RARE_FRACTION = 0.1
"""A length that only so few batches have, such as that of the last one, is not followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedStep:
    """A step for batches of one shape: its order of events, and the bytes of its blocks."""

    template: StepTemplate
    sizes: Sequence[int]
    """In bytes, by block of the template."""
    method: str
    """``recorded``, ``fitted``, ``nearest larger``: the step of a recorded larger batch, or
    ``larger than recorded``: the step of the largest recorded one, which is too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """Polynomials of the lengths for the blocks of steps in the same order."""

    members: Sequence[int]
    passing: frozenset[Key]
    """The blocks that pass in every one of these steps."""
    coefficients: _Array
    is_exact: _Array
    """By block: whether every recorded size is met, those that were left out included."""


class StepSizes:
    """Know the step of each distinct shape of an epoch.

    Steps whose operators, allocations and frees come in the same order are taken together, and the
    bytes of each block are a polynomial of at most the second degree of the lengths that vary in
    the batches. One recorded step is left out of the fit and checked: a polynomial is used only
    where it meets every recorded size to the byte. A block without one takes the bytes of the
    nearest recorded larger batch, as does the whole step where too few were recorded in its order.

    Args:
        data: the scan.
        steps: the templates of all recorded steps.
    """

    def __init__(self, data: ScannedData, steps: Sequence[StepTemplate]) -> None:
        known = {each.shape: steps[each.step] for each in reversed(data.recorded)}
        self._shapes = data.shapes
        self._known = known
        lengths = varying_lengths(data.shapes)
        self._points = _scaled(lengths)
        self.lengths, self._is_usual = _usual(lengths, np.bincount(data.order))
        self._followed = _scaled(self.lengths)
        self._fits: dict[int, _Fit] = {}
        self._group()

    def of(self, shape: int) -> SizedStep:
        """Return the step of a shape, named by its place."""
        if shape in self._known:
            return _as_recorded(self._known[shape], RECORDED)
        nearest = min(self._known, key=lambda each: self._distance(each, shape))
        fit = self._fits.get(nearest) if self._is_usual[shape] else None
        if fit is None:
            larger, is_larger = self._larger(shape, self._known)
            return _as_recorded(self._known[larger], NEAREST if is_larger else BEYOND)
        # What no polynomial gives is taken from a larger batch, its passing blocks included.
        template = self._known[self._larger(shape, fit.members)[0]]
        row = _monomials(self._followed[shape : shape + 1])
        fitted = np.rint(row @ fit.coefficients)[0].astype(np.int64)
        sizes = np.array(template.sizes)
        columns = _columns(template, fit.passing)
        sizes[columns] = np.where(fit.is_exact, fitted, sizes[columns])
        return SizedStep(template=template, sizes=sizes.tolist(), method=FITTED)

    def fraction_fitted(self) -> float:
        """Return the share of the bytes in fitted steps that polynomials give."""
        exact = whole = 0.0
        for place, fit in self._fits.items():
            sizes = np.array(self._known[place].sizes)
            exact += float(sizes[_columns(self._known[place], fit.passing)][fit.is_exact].sum())
            whole += float(sizes.sum())
        return exact / whole if whole else 0.0

    def _group(self) -> None:
        groups: list[list[int]] = []
        for place, template in self._known.items():
            for group in groups:
                if self._known[group[0]].has_order_of(template):
                    group.append(place)
                    break
            else:
                groups.append([place])
        for group in groups:
            fit = self._fitted(group)
            self._fits.update({} if fit is None else dict.fromkeys(fit.members, fit))

    def _fitted(self, members: Sequence[int]) -> _Fit | None:
        if not 1 <= self.lengths.shape[1] <= _MOST_LENGTHS:
            return None
        ordered = [each for each in members if self._is_usual[each]]
        ordered.sort(key=lambda each: tuple(self._followed[each]))
        rows = _monomials(self._followed[ordered])
        if len(ordered) <= rows.shape[1]:
            return None  # nothing would be left to check it with
        passing = frozenset.intersection(*(_keys(self._known[each]) for each in ordered))
        sizes = np.array(
            [
                np.array(template.sizes)[_columns(template, passing)]
                for template in map(self._known.__getitem__, ordered)
            ],
            dtype=np.float64,
        )
        used = [number for number in range(len(ordered)) if number != len(ordered) // 2]
        if np.linalg.matrix_rank(rows[used]) < rows.shape[1]:
            return None
        coefficients = np.linalg.lstsq(rows[used], sizes[used], rcond=None)[0]
        is_exact = (np.rint(rows @ coefficients) == sizes).all(axis=0)
        return _Fit(members=ordered, passing=passing, coefficients=coefficients, is_exact=is_exact)

    def _distance(self, one: int, other: int) -> float:
        if self._points.shape[1]:
            return float(np.abs(self._points[one] - self._points[other]).max())
        return float(abs(_elements(self._shapes[one]) - _elements(self._shapes[other])))

    def _larger(
        self, shape: int, among: Sequence[int] | dict[int, StepTemplate]
    ) -> tuple[int, bool]:
        """Return the smallest recorded shape that is nowhere smaller, and whether there is one.

        Where there is none, the largest is returned.
        """
        elements = {each: _elements(self._shapes[each]) for each in among}
        larger = [
            each
            for each in among
            if elements[each] >= _elements(self._shapes[shape])
            and bool((self._points[each] >= self._points[shape]).all())
        ]
        if larger:
            return min(larger, key=elements.__getitem__), True
        return max(elements, key=elements.__getitem__), False


def _as_recorded(template: StepTemplate, method: str) -> SizedStep:
    return SizedStep(template=template, sizes=template.sizes, method=method)


def _keyed(template: StepTemplate) -> dict[Key, Passing]:
    found: dict[Key, Passing] = {}
    here: Counter[int] = Counter()
    for each in template.passing:
        found[each.position, here[each.position], each.operator, each.num_blocks] = each
        here[each.position] += 1
    return found


def _keys(template: StepTemplate) -> frozenset[Key]:
    return frozenset(_keyed(template))


def _columns(template: StepTemplate, passing: frozenset[Key]) -> list[int]:
    """Return the blocks that a step has in common with others, in the same order for all."""
    found, columns = _keyed(template), list(range(len(template.operators)))
    for key in sorted(passing):
        first = found[key].first_block
        columns += range(first, first + found[key].num_blocks)
    return columns


def varying_lengths(shapes: Sequence[BatchShape]) -> _Array:
    """Return the lengths in which batches differ, one row per shape, ``(shapes, lengths)``.

    Lengths of which one follows from another on a straight line are one. There is no column where
    batches do not hold the same number of tensors with the same number of dimensions.
    """
    ranks = {tuple(len(sizes) for sizes, _ in shape) for shape in shapes}
    if len(ranks) != 1:
        return np.zeros((len(shapes), 0), dtype=np.int64)
    table = np.array(
        [[length for sizes, _ in shape for length in sizes] for shape in shapes], dtype=np.int64
    ).reshape(len(shapes), -1)
    chosen: list[_Array] = []
    for column in table.T:
        if (column != column[0]).any() and not any(_is_on_a_line(each, column) for each in chosen):
            chosen.append(column)
    return np.stack(chosen, axis=1) if chosen else np.zeros((len(shapes), 0), dtype=np.int64)


def _is_on_a_line(one: _Array, other: _Array) -> bool:
    """Return whether the second follows from the first, which varies, on a straight line."""
    apart = int(np.argmax(one != one[0]))
    run, rise = int(one[apart] - one[0]), int(other[apart] - other[0])
    return bool(((other - other[0]) * run == (one - one[0]) * rise).all())


def _usual(lengths: _Array, counts: _Array) -> tuple[_Array, _Array]:
    """Leave out the lengths that nearly all batches share; say which shapes have the shared ones.

    Args:
        lengths: one row per shape.
        counts: how many batches have it.
    """
    followed, is_usual = [], np.ones(len(lengths), dtype=bool)
    for column in lengths.T:
        values, places = np.unique(column, return_inverse=True)
        shares = np.bincount(places, weights=counts) / counts.sum()
        if shares.max() < 1 - _RARE_FRACTION:
            followed.append(column)
        else:
            is_usual &= column == values[shares.argmax()]
    none = np.zeros((len(lengths), 0), dtype=np.int64)
    return (np.stack(followed, axis=1) if followed else none), is_usual


def _scaled(lengths: _Array) -> _Array:
    most = np.maximum(lengths.max(axis=0, initial=1), 1)
    return np.asarray(lengths / most)


def _monomials(points: _Array) -> _Array:
    """Return 1, the lengths and their products of two, one row per point."""
    lengths = [np.ones(len(points)), *points.T]
    pairs = combinations_with_replacement(range(len(lengths)), 2)
    return np.stack([lengths[one] * lengths[other] for one, other in pairs], axis=1)


def _elements(shape: BatchShape) -> int:
    return sum(prod(sizes) for sizes, _ in shape)
