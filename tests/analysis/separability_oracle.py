"""Compares what the walk says of every tensor of a step with numbers: whole batch against pieces.

The step runs on real tensors, once on the whole batch and once on each piece. Whatever is said of
a result, at the time it is made and at the end, has to be true of the numbers.
"""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.analysis import walk
from memfit.analysis.alignment import RecordingsDifferError
from memfit.analysis.dataflow import DataflowRecorder, tensors_in
from memfit.analysis.flow import Axis, Flow, Kind
from memfit.analysis.use import NOTHING_GIVEN, Sizes


@dataclass
class Leaf:
    """A tensor of the step: cut along a dimension into samples, or (axis None) the same for all."""

    tensor: torch.Tensor
    dim: int | None = None
    axis: Axis | None = None
    is_parameter: bool = False

    def piece(self, samples: Sequence[int], size: int) -> torch.Tensor:
        if self.axis is None or self.dim is None:
            return self.tensor.detach().clone().requires_grad_(self.tensor.requires_grad)
        index = rows_of(self.axis, samples, size)
        found = self.tensor.detach().index_select(self.dim, index).clone()
        return found.requires_grad_(self.tensor.requires_grad)

    def flow(self) -> Flow:
        axes: list[Axis | None] = [None] * self.tensor.dim()
        if self.dim is not None:
            axes[self.dim] = self.axis
        kind = Kind.FREE if self.axis is None else Kind.EACH
        return Flow(kind=kind, axes=tuple(axes))


@dataclass
class Verdict:
    """How many claims were compared, and those that are false."""

    num_claims: int = 0
    num_bad: int = 0
    false: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    final: list[Flow] = field(default_factory=list)


def rows_of(axis: Axis, samples: Sequence[int], size: int) -> torch.Tensor:
    index = torch.arange(axis.outer * size * axis.inner).view(axis.outer, size, axis.inner)
    return index[:, list(samples)].flatten()


class _Keeping(DataflowRecorder):
    """Keep copies of all results, which later operators may write over."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Module())
        self.kept: list[list[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        last = self.flow.calls[-1] if self.flow.calls else None
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.flow.calls and self.flow.calls[-1] is not last:
            with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                copies = [each.detach().clone() for each in tensors_in(out)]
            del self.kept[len(self.flow.calls) - 1 :]  # a copy counts with what it was made in
            self.kept.append(copies)
        return out


def _recorded(step: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, list[int]]:
    recorder = _Keeping()
    with recorder:
        numbers = [recorder.number_of(each) for each in tensors]
        step(*tensors)
    return recorder, numbers


def compared(
    step: Callable[..., Any], leaves: Sequence[Leaf], pieces: Sequence[Sequence[int]]
) -> Verdict:
    """Run a step on all samples and on pieces of one size; compare all that the walk says."""
    size = sum(map(len, pieces))
    whole, numbers = _recorded(step, [leaf.piece(range(size), size) for leaf in leaves])
    parts = [_recorded(step, [leaf.piece(piece, size) for leaf in leaves])[0] for piece in pieces]
    verdict = Verdict()
    known = {number: leaf.flow() for number, leaf in zip(numbers, leaves, strict=True)}
    log: list[tuple[Any, Any, list[Flow]]] = []
    found = _followed(whole, parts[0], Sizes(size, len(pieces[0])), known, log)
    if found is None:
        verdict.num_bad += 1
        verdict.problems.append("the recordings differ")
        return verdict
    places = {id(call): place for place, call in enumerate(whole.flow.calls)}
    others = {id(call): place for place, call in enumerate(parts[0].flow.calls)}
    for call, other, flows in log:
        is_found = any(word in str(call.func) for word in ("empty", "copy_"))
        if call.func.is_view or is_found or id(other) not in others:
            continue  # may hold what lay in memory before; or torch has left the call out
        here, there = places[id(call)], others[id(other)]
        for which, flow in enumerate(flows[: len(call.results)]):
            values = [part.kept[there][which] for part in parts]
            _check(verdict, f"{call.func} result {which}", flow, whole.kept[here][which], values,
                   pieces)  # fmt: skip
    walked, alignment = found
    for number, flow in walked.flows.items():
        counterpart = alignment.other_of.get(number)
        if counterpart is None:
            continue
        values = [part.flow.objects[counterpart][0] for part in parts]
        _check(verdict, f"tensor {number} at the end", flow, whole.flow.objects[number][0], values,
               pieces)  # fmt: skip
    return verdict


def _followed(whole: Any, part: Any, sizes: Sizes, known: Any, log: list[Any]) -> Any:
    class Logging(walk._Walk):
        def _keep(self, use: Any, flows: Any) -> None:
            super()._keep(use, flows)
            log.append((use.call, use.other, list(flows)))

    followed = Logging((whole.flow, part.flow), sizes, known, {}, given=NOTHING_GIVEN)
    try:
        return followed.run(), followed._alignment
    except RecordingsDifferError:
        return None


def _check(
    verdict: Verdict,
    name: str,
    flow: Flow,
    whole: torch.Tensor,
    parts: Sequence[torch.Tensor],
    pieces: Sequence[Sequence[int]],
) -> None:
    if flow.is_bad:
        verdict.num_bad += 1
        assert flow.problem is not None
        verdict.problems.append(f"{flow.problem.culprit.operator}: {flow.problem.sentence}")
        return
    if flow.is_opaque or flow.is_drawn:
        return
    verdict.num_claims += 1
    with torch.no_grad():
        reason = _why_false(flow, whole.detach(), [part.detach() for part in parts], pieces)
    if reason:
        verdict.false.append(f"{name}: {reason} ({flow})")


def _why_false(
    flow: Flow, whole: torch.Tensor, parts: list[torch.Tensor], pieces: Sequence[Sequence[int]]
) -> str:
    if flow.is_uniform and whole.numel():
        first = whole.flatten()[0]
        if not _equal(whole, first.expand_as(whole)):
            return "is not uniform"
        if flow.value is not None and not _equal(first, torch.full_like(first, flow.value)):
            return f"is not {flow.value}"
    if flow.kind is Kind.SUM:
        total = torch.stack([part * 1.0 for part in parts]).sum(0)
        return "" if _equal(total / flow.ratio, whole * 1.0) else "is no sum"
    if flow.kind is Kind.FREE:
        is_free = all(_equal(part, whole * flow.ratio) for part in parts)
        return "" if is_free else "is not free"
    return _why_not_each(flow, whole, parts, pieces)


def _why_not_each(
    flow: Flow, whole: torch.Tensor, parts: list[torch.Tensor], pieces: Sequence[Sequence[int]]
) -> str:
    size, dim = sum(map(len, pieces)), flow.batch_dim
    assert dim is not None
    axis = flow.axes[dim]
    assert axis is not None
    count = axis.outer * axis.inner
    splits = [Axis(1, count), Axis(count, 1)] if axis.wild else [axis]
    if flow.is_positions:
        for sample in range(size):
            rows = whole.index_select(dim, rows_of(axis, [sample], size))
            if not _equal(rows, torch.full_like(rows, sample)):
                return "is no position"
        return ""
    for split in splits:
        for piece, part in zip(pieces, parts, strict=True):
            wanted = whole.index_select(dim, rows_of(split, piece, size))
            if not _equal(wanted if flow.ratio == 1 else wanted * flow.ratio, part):
                return "is not each sample's own"
    return ""


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.dtype != other.dtype or not (one.is_floating_point() or one.is_complex()):
        wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
        one, other = one.to(wide), other.to(wide)
    scale = float(other.abs().nan_to_num(0.0, 0.0, 0.0).max()) if other.numel() else 1.0
    return torch.allclose(one, other, rtol=1e-6, atol=1e-9 * max(1.0, scale), equal_nan=True)


def torch_operators() -> list[Any]:
    """Return torch's own operators with sample inputs, without the one package that its tests need."""
    if "expecttest" not in sys.modules:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stand_in.assert_expected_inline = None  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)
