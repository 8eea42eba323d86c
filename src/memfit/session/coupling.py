"""Finds out whether a loss couples the samples of a batch, by computing it on parts of one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from memfit.devices.detect import free_memory_bytes
from memfit.errors import MemfitError
from memfit.job import Job
from memfit.session.batches import BatchLayout
from memfit.session.borrowing import borrowed_to_run
from memfit.session.loss_probe import LossProbe, LossValue, open_probe, probe_cost
from memfit.units import format_bytes

_MOST_FLOPS = 2e12
_MEMORY_SHARE = 0.5
_UNITS = (1, 2)
"""Samples that are moved as one; some losses need an even number of them."""
_PAIRS = ((0, 1), (0, 2), (1, 2))
_ALL = (0, 1, 2)
_SMALLEST_WEIGHT = 1e-6
_FIT = 3e-2
"""How much of what is to be explained by weights they may leave."""


class CouplingKind(StrEnum):
    """Say in which way a loss is no mean over samples."""

    COUPLED = "coupled"
    UNEQUAL_COUNTS = "unequal-counts"
    SUM = "sum"
    NOT_CHECKED = "not-checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """How a loss couples the samples of a batch, or why that is not known."""

    kind: CouplingKind
    sentence: str

    @property
    def forbids_pieces(self) -> bool:
        """Say whether gradients of pieces of a batch do not add up to those of the batch."""
        return self.kind is not CouplingKind.NOT_CHECKED


@dataclass(frozen=True, slots=True)
class _Losses:
    """Losses of three parts of a batch: each alone, in pairs and together."""

    alone: Sequence[float]
    pairs: Sequence[float]
    together: float
    tolerance: float

    @property
    def scale(self) -> float:
        known = [abs(value) for value in (*self.alone, self.together) if math.isfinite(value)]
        return max(known, default=0.0) or 1.0

    @property
    def gap(self) -> float:
        """Give how far the loss of all parts is from the mean of their losses."""
        gap = abs(self.together - math.fsum(self.alone) / len(self.alone))
        return gap if math.isfinite(gap) else self.scale

    def is_close(self, found: float, expected: float) -> bool:
        return abs(found - expected) <= self.tolerance * self.scale


def find_coupling(
    job: Job, layout: BatchLayout, *, most_flops: float = _MOST_FLOPS
) -> Coupling | None:
    """Compute a job's loss on parts of a small batch, and see whether it is their mean.

    Runs forward and loss on real tensors on the CPU, in fp64 where the model can, with a model of
    its own, random draws stilled and batch normalisation frozen (it is detected by itself).

    Args:
        job: whose loss; the batch function should give samples that differ.
        layout: of its batches.
        most_flops: operations that the answer may take.

    Returns:
        None where the loss is the mean over samples, or a ``Total`` that adds up over them.

    Limits: what shows only in larger batches, in other data (equal lengths where training has
    ragged ones) or in gradients alone is not seen; `memfit verify` proves a plan as it is.
    """
    problem = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # code for whole batches may warn about small ones
        for unit in _UNITS:
            try:
                if refusal := _refusal(probe_cost(job, layout, unit), most_flops):
                    return _not_checked(refusal)
                with borrowed_to_run(job) as borrowed_job:
                    return _coupling(open_probe(borrowed_job, layout, unit))
            except (MemfitError, RuntimeError) as error:
                problem = problem or str(error).rstrip(".")
    return _not_checked(problem)


def _refusal(cost: tuple[int, int], most_flops: float) -> str:
    """Say why the loss cannot be computed here; empty if it can."""
    num_bytes, num_flops = cost
    free = free_memory_bytes()
    if free is not None and num_bytes > _MEMORY_SHARE * free:
        return f"a few samples take {format_bytes(num_bytes)} and {format_bytes(free)} are free"
    if num_flops > most_flops:
        return f"it would take {num_flops:.1g} operations on the CPU, more than {most_flops:.0g}"
    return ""


def _coupling(probe: LossProbe) -> Coupling | None:
    """Judge a loss by its values."""
    alone = [probe.value((part,)) for part in _ALL]
    together = probe.value(_ALL)
    if not together.is_finite:
        return _not_checked("it is not a finite number on a few samples")
    if together.count is not None:
        found = _total_coupling(alone, together, probe.tolerance)
    else:
        found = _mean_coupling(probe, [each.sum for each in alone], together.sum)
    if found is None:
        if probe.parts_are_alike:
            return _not_checked("all samples of the job's batch are alike; let batch() draw them")
        return None
    again = probe.value(_ALL)
    steady = math.isclose(again.sum, together.sum, rel_tol=probe.tolerance)
    if probe.unstilled or not steady:
        names = ", ".join(sorted(probe.unstilled)) or "from outside torch"
        return _not_checked(f"it depends on random draws that cannot be stilled ({names})")
    return found


def _mean_coupling(probe: LossProbe, alone: Sequence[float], together: float) -> Coupling | None:
    """Judge a loss that is one number."""
    first = _Losses(alone, (), together, probe.tolerance)
    if first.gap <= first.tolerance * first.scale:
        return None
    if first.is_close(together, math.fsum(alone)):
        return Coupling(kind=CouplingKind.SUM, sentence=_SUM)
    losses = _Losses(alone, [probe.value(pair).sum for pair in _PAIRS], together, probe.tolerance)
    if _has_fixed_weights(losses):
        return Coupling(kind=CouplingKind.UNEQUAL_COUNTS, sentence=_UNEQUAL_COUNTS)
    if _depends_on_contents(probe, first) is False:
        return Coupling(kind=CouplingKind.UNEQUAL_COUNTS, sentence=_SEVERAL_COUNTS)
    difference = first.gap / first.scale
    return Coupling(kind=CouplingKind.COUPLED, sentence=_COUPLED.format(difference))


def _total_coupling(
    alone: Sequence[LossValue], together: LossValue, tolerance: float
) -> Coupling | None:
    """Judge a Total: its sum and its count must add up over samples."""
    gaps = {}
    for name in ("sum", "count"):
        parts = [float(getattr(each, name)) for each in alone]
        whole = float(getattr(together, name))
        scale = max(map(abs, (*parts, whole))) or 1.0
        gap = abs(whole - math.fsum(parts)) / scale
        gaps[name] = gap if math.isfinite(gap) else 1.0
    worst = max(gaps, key=lambda name: gaps[name])
    if gaps[worst] <= tolerance:
        return None
    return Coupling(kind=CouplingKind.COUPLED, sentence=_TOTAL.format(worst, gaps[worst]))


def _has_fixed_weights(losses: _Losses) -> bool:
    """Say whether the loss is a weighted mean, with one weight for each part in any company.

    From loss(0, j) = (w0 l0 + wj lj) / (w0 + wj) follow the weights; the other equations then hold
    or they don't. A part without items has no loss of its own and weighs nothing.
    """
    weights = _weights(losses)
    if weights is None:
        return False

    def is_mean(parts: Sequence[int], found: float) -> bool:
        parts = [part for part in parts if weights[part]]
        if not parts:
            return math.isnan(found)
        total = math.fsum(weights[part] for part in parts)
        mean = math.fsum(weights[part] * losses.alone[part] for part in parts) / total
        return abs(found - mean) <= _FIT * losses.gap

    equations = ((_ALL, losses.together), *zip(_PAIRS, losses.pairs, strict=True))
    return all(is_mean(parts, found) for parts, found in equations)


def _weights(losses: _Losses) -> Sequence[float] | None:
    """Give the weights of the parts that the losses of pairs imply; None where they imply none."""
    alone = losses.alone
    known = [part for part in _ALL if math.isfinite(alone[part])]
    weights = [0.0] * len(_ALL)
    for part in known:
        if part == known[0]:
            weights[part] = 1.0
            continue
        pair = losses.pairs[_PAIRS.index((known[0], part))]
        gain, rest = alone[known[0]] - pair, pair - alone[part]
        if not gain * rest > 0.0:
            return None
        weights[part] = gain / rest
    known_weights = [weights[part] for part in known]
    is_plausible = known and max(known_weights) * _SMALLEST_WEIGHT < min(known_weights)
    return weights if is_plausible else None


def _depends_on_contents(probe: LossProbe, losses: _Losses) -> bool | None:
    """Say whether what a change of one part does to the loss depends on what the others contain.

    None where no part can be changed, since the batch holds whole numbers only.
    """
    if not probe.can_perturb:
        return None

    def with_kept(parts: Sequence[int]) -> float:
        return probe.value(_ALL, kept=parts).sum

    in_old_company = with_kept((0, 1, 2)) - with_kept((1, 2))
    in_new_company = with_kept((0,)) - with_kept(())
    second = in_old_company - in_new_company
    return not abs(second) <= losses.tolerance * losses.scale


def _not_checked(reason: str) -> Coupling:
    return Coupling(kind=CouplingKind.NOT_CHECKED, sentence=_NOT_CHECKED.format(reason))


_COUPLED = (
    "the loss couples the samples of a batch: on a few samples at once it differs by {:.2g} "
    "(relative) from the mean of their own losses, as in-batch negatives, statistics over the "
    "batch and rankings do. Micro-batches would train something else; keep the batch whole."
)
_UNEQUAL_COUNTS = (
    "the loss is a mean over items whose number differs between samples; return "
    "memfit.Total(sum, count), which micro-batches weight by their true counts."
)
_SEVERAL_COUNTS = (
    "terms of the loss are means over items whose number differs between samples, each in its own "
    "way; divide them by numbers that do not depend on the batch, or keep the batch whole."
)
_SUM = (
    "the loss is a sum over samples, not their mean; divide it by the number of samples, and "
    "multiply the learning rate by it."
)
_TOTAL = (
    "the {} of the loss's memfit.Total does not add up over samples (on a few it is off by {:.2g}, "
    "relative); a term that belongs to no sample has to be multiplied by the count."
)
_NOT_CHECKED = "whether the loss couples the samples of a batch was not checked: {}."
