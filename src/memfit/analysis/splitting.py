"""Tries an operator that has no rule on small real tensors: whole, and cut into pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memfit.analysis.dataflow import Ref
from memfit.analysis.flow import Axes, Axis, Flow, Kind
from memfit.analysis.use import NotFollowedError, Use
from memfit.trace.operators import tensors_in

_CUTS = (
    (2, ((0,), (1,))),
    (4, ((0,), (1, 2, 3))),
    (4, ((0, 2), (1, 3))),
    (4, ((0,), (1,), (2,), (3,))),
    (6, ((5, 0, 1), (2, 3), (4,))),
    (6, ((0, 1, 2, 3, 4), (5,))),
    (33, (tuple(range(17)), tuple(range(17, 33)))),
)
"""Numbers of samples, and how they are cut."""
_SCALES = (1.0, 0.1, 30.0, 1e-3, 1e3)


class _Special(StrEnum):
    """Samples that an operator may treat in another way than random ones."""

    ZEROS = "zeros"
    EQUAL = "equal"
    """All samples are the same."""
    OUTLIER = "outlier"
    """One sample is far larger than the others."""
    ORDERED = "ordered"
    """Each sample is larger than the one before."""


_FAR = 1e3
_MOST_ELEMENTS = 1_000_000
_MOST_INDEX = 2
"""Whole numbers are drawn below this, so that they may be indices."""
_REFUSED_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)
_NOT_KNOWN = "is not known to keep samples apart"


@dataclass(frozen=True, slots=True)
class _Result:
    """What the pieces of a result may be to the whole of it."""

    kind: Kind
    axes: Axes
    weighs: bool = False
    """Whether pieces count by their numbers of samples, as those of a mean do."""


def split_alone(use: Use) -> list[Flow]:
    """Return what an operator does with samples by running it on pieces of small tensors.

    That can show that samples meet. That they do not, it makes very likely and no more: all pieces
    agree, for several cuts of several draws of different scales, of samples that are zero, equal,
    ordered or far apart, and for the batch sizes in question. Whoever relies on it has to say so.

    Raises:
        NotFollowedError: if that shows nothing.
    """
    flows = use.flows
    _check_kind(use, flows)
    is_drawn = any(flow.is_drawn for flow in flows)
    try:
        with _disable_current_modes(), torch.no_grad():
            trials = list(_trials(use))
            found = [_agreed(use, which, trials) for which in range(len(use.call.results))]
    except NotFollowedError:
        raise
    except Exception as error:  # whatever an operator may raise for tensors that it does not like
        raise NotFollowedError(_NOT_KNOWN) from error
    shrink = use.sizes.shrink
    return [
        Flow(kind=each.kind, axes=each.axes, ratio=shrink if each.weighs else 1.0,
             is_drawn=is_drawn)
        for each in found
    ]  # fmt: skip


def _check_kind(use: Use, flows: Sequence[Flow]) -> None:
    """Refuse operators that cannot be tried.

    Raises:
        NotFollowedError: if this is one.
    """
    func = use.call.func
    is_refused = func._schema.is_mutable or any(tag in func.tags for tag in _REFUSED_TAGS)
    if is_refused or not use.call.results or not any(f.kind is Kind.EACH for f in flows):
        raise NotFollowedError(_NOT_KNOWN)
    for flow in flows:
        is_usual = flow.is_plain and not flow.is_opaque and not flow.is_positions
        if (
            flow.kind is Kind.SUM
            or not is_usual
            or any(a is not None and a.wild for a in flow.axes)
        ):
            raise NotFollowedError(_NOT_KNOWN)


@dataclass(frozen=True, slots=True)
class _Trial:
    """One draw and cut: the results for all samples, and for each piece."""

    num_samples: int
    pieces: tuple[tuple[int, ...], ...]
    whole: list[torch.Tensor]
    parts: list[list[torch.Tensor]]


def _trials(use: Use) -> Iterator[_Trial]:
    generator = torch.Generator().manual_seed(0)
    for cut in _CUTS:
        for scale in _SCALES:
            yield _trial(use, cut, {ref: _drawn(use, ref, cut[0], scale, generator)
                                    for ref in use.tensors})  # fmt: skip
    yield from _special_trials(use, generator)


def _special_trials(use: Use, generator: torch.Generator) -> Iterator[_Trial]:
    """Try what an operator may refuse, which shows nothing: special samples, and large batches."""
    size, part = use.sizes.first, use.sizes.second
    pieces = tuple(tuple(range(size))[at : at + part] for at in range(0, size, part))
    specials = [(cut, special) for cut in _CUTS[1:4] for special in _Special]
    for cut, special in (*specials, ((size, pieces), None)):
        try:
            drawn = {ref: _drawn(use, ref, cut[0], 1.0, generator) for ref in use.tensors}
            if special is not None:
                for ref in drawn:
                    drawn[ref] = _made_special(use, ref, drawn[ref], cut[0], special)
            trial = _trial(use, cut, drawn)
        except Exception:  # noqa: BLE001, S112 - singular matrices, tensors that are too large
            continue
        yield trial


def _trial(
    use: Use, cut: tuple[int, tuple[tuple[int, ...], ...]], drawn: Mapping[Ref, torch.Tensor]
) -> _Trial:
    num_samples, pieces = cut
    whole, parts = _results(use, drawn.__getitem__), []
    for piece in pieces:
        given = {ref: _cut(use, ref, value, piece, num_samples) for ref, value in drawn.items()}
        parts.append(_results(use, given.__getitem__))
    return _Trial(num_samples, pieces, whole, parts)


def _drawn(
    use: Use, ref: Ref, num_samples: int, scale: float, generator: torch.Generator
) -> torch.Tensor:
    shape = use.shape_of(ref)
    flow = use.flow_of(ref)
    sizes = [
        extent if axis is None else axis.extent(num_samples)
        for extent, axis in zip(shape.sizes, flow.axes, strict=True)
    ]
    count = 1
    for extent in sizes:
        count *= extent
    if count > _MOST_ELEMENTS:
        raise NotFollowedError(_NOT_KNOWN)
    if shape.dtype.is_floating_point or shape.dtype.is_complex:
        dtype = torch.complex128 if shape.dtype.is_complex else torch.float64
        return torch.randn(sizes, dtype=dtype, generator=generator) * scale
    return torch.randint(_MOST_INDEX, sizes, generator=generator).to(shape.dtype)


def _made_special(
    use: Use, ref: Ref, value: torch.Tensor, num_samples: int, special: _Special
) -> torch.Tensor:
    """Change the samples in a tensor; what has none, and far numbers of indices, stay."""
    flow = use.flow_of(ref)
    dim = flow.batch_dim
    if dim is None:
        return value
    axis = flow.axes[dim]
    assert axis is not None
    if special is _Special.ZEROS:
        return torch.zeros_like(value)
    sample = torch.arange(axis.extent(num_samples)) // axis.inner % num_samples
    if special is _Special.EQUAL:
        return value.index_select(dim, torch.arange(len(sample)) - sample * axis.inner)
    if not (value.is_floating_point() or value.is_complex()):
        return value
    factors = sample + 1.0 if special is _Special.ORDERED else 1.0 + _FAR * (sample == 0)
    lined_up = [-1 if place == dim else 1 for place in range(value.dim())]
    values = value.abs() if special is _Special.ORDERED else value
    return values.to(value.dtype) * factors.to(torch.float64).view(lined_up)


def _cut(
    use: Use, ref: Ref, value: torch.Tensor, piece: Sequence[int], num_samples: int
) -> torch.Tensor:
    flow = use.flow_of(ref)
    dim = flow.batch_dim
    if dim is None:
        return value
    axis = flow.axes[dim]
    assert axis is not None
    return value.index_select(dim, _rows(axis, piece, num_samples))


def _rows(axis: Axis, piece: Sequence[int], num_samples: int) -> torch.Tensor:
    """Return the indices of some samples along their dimension."""
    index = torch.arange(axis.extent(num_samples)).view(axis.outer, num_samples, axis.inner)
    return index[:, list(piece)].flatten()


def _results(use: Use, value_of: Callable[[Ref], torch.Tensor]) -> list[torch.Tensor]:
    def given(value: Any) -> Any:
        if isinstance(value, Ref):
            return value_of(value)
        return [given(each) for each in value] if isinstance(value, tuple) else value

    positional, named = [], {}
    for value, argument in zip(use.call.arguments, use.call.func._schema.arguments, strict=True):
        if argument.kwarg_only:
            named[argument.name] = given(value)
        else:
            positional.append(given(value))
    return list(tensors_in(use.call.func(*positional, **named)))


def _agreed(use: Use, which: int, trials: Sequence[_Trial]) -> _Result:
    """Find what all trials say of one result.

    Raises:
        NotFollowedError: if nothing is true of all of them, or too much is.
    """
    found = [
        each for each in _candidates(use, which) if all(_holds(each, which, t) for t in trials)
    ]
    if len(found) != 1:
        raise NotFollowedError(_NOT_KNOWN)
    return found[0]


def _candidates(use: Use, which: int) -> Iterator[_Result]:
    ref = use.call.results[which]
    varying = use.varying_axes(ref)
    places = [place for place, axis in enumerate(varying) if axis is not None]
    if not places:
        for weighs in (False, True):
            yield _Result(Kind.SUM, (None,) * len(varying), weighs)
        return
    if len(places) > 1:
        return
    axis = varying[places[0]]
    assert axis is not None
    for outer in range(1, axis.inner + 1):
        if axis.inner % outer == 0:
            mine = Axis(outer=outer, inner=axis.inner // outer)
            axes = tuple(mine if place == places[0] else None for place in range(len(varying)))
            yield _Result(Kind.EACH, axes)


def _holds(result: _Result, which: int, trial: _Trial) -> bool:
    whole, parts = trial.whole[which], [part[which] for part in trial.parts]
    if result.kind is Kind.SUM:
        weights = [
            len(piece) / trial.num_samples if result.weighs else 1.0 for piece in trial.pieces
        ]
        total = sum(part * weight for part, weight in zip(parts, weights, strict=True))
        assert isinstance(total, torch.Tensor)
        return _equal(total, whole)
    dim = next(place for place, axis in enumerate(result.axes) if axis is not None)
    axis = result.axes[dim]
    assert axis is not None
    if whole.dim() <= dim or whole.shape[dim] != axis.extent(trial.num_samples):
        return False
    return all(
        _equal(part, whole.index_select(dim, _rows(axis, piece, trial.num_samples)))
        for piece, part in zip(trial.pieces, parts, strict=True)
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.is_complex() != other.is_complex():
        return False
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    finite = other.abs().nan_to_num(0.0, 0.0, 0.0)
    largest = float(finite.max()) if finite.numel() else 0.0
    atol = 1e-9 * max(1.0, 1e-3 * largest)  # rounding, where large numbers cancel
    return torch.allclose(one, other, rtol=1e-7, atol=atol, equal_nan=True)
