"""Computes a job's loss on chosen parts of a small batch, with everything random taken out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.allocator.simulate import CPU_RULES, peak_bytes
from memfit.errors import JobFunctionError, MemfitError
from memfit.job import Job, Total
from memfit.session.batches import BatchLayout, real_batch, shapes_of
from memfit.session.borrowing import borrowed_to_record
from memfit.session.conversion import convert_model, converted, default_dtype
from memfit.session.normalisation import BatchNorm
from memfit.session.session import Session, open_session
from memfit.session.stilled_randomness import StilledRandomness, untouched_randomness
from memfit.trace.recorder import Recorder
from memfit.trace.virtual import ValuesNeededError, as_virtual, virtual_tensors

_NUM_PARTS = 3
_NUM_EVALUATIONS = 2
"""How often all parts pass through the model when nothing is found: alone and together."""
_NOISE = 0.05
_NOISE_AT_ZERO = 0.02
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4}
_COARSEST = 2e-2


@dataclass(frozen=True, slots=True)
class LossValue:
    """A loss as numbers: its value, or the sum and the count of a Total."""

    sum: float
    count: float | None = None

    @property
    def is_finite(self) -> bool:
        """Say whether it is a number at all."""
        return math.isfinite(self.sum) and (self.count is None or math.isfinite(self.count))


class LossProbe:
    """Compute a loss on some of three parts of a batch; made by ``open_probe``."""

    def __init__(self, session: Session, batch: Any, unit: int, dtype: torch.dtype) -> None:
        self._session = session
        self._unit = unit
        self._dtype = dtype
        self._buffers = [(buffer, buffer.clone()) for buffer in session.model.buffers()]
        self.tolerance = _TOLERANCES[dtype]
        self.unstilled: set[str] = set()
        self.can_perturb = _has_floats(session.layout, batch)
        self.parts_are_alike = self._are_alike(batch)
        if self.parts_are_alike and self.can_perturb:
            batch, self.parts_are_alike = _perturbed(session.layout, batch), False
        self._batch = batch
        self._other = _perturbed(session.layout, batch)

    def value(self, parts: Sequence[int], kept: Sequence[int] = (0, 1, 2)) -> LossValue:
        """Give the loss of some parts; those that are not in ``kept`` with changed contents."""
        batch = self._session.layout.selection(self._mixed(kept), self._samples(parts))
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        stilled = StilledRandomness()
        with default_dtype(self._dtype), torch.enable_grad(), untouched_randomness(), stilled:
            torch.manual_seed(0)
            loss = self._session.loss_of(batch)
        self.unstilled |= stilled.unstilled
        value = loss.sum if isinstance(loss, Total) else loss
        self.tolerance = max(self.tolerance, _TOLERANCES.get(value.dtype, _COARSEST))
        count = float(loss.count) if isinstance(loss, Total) else None
        return LossValue(float(value.detach()), count)

    def _samples(self, parts: Sequence[int]) -> list[int]:
        return [part * self._unit + each for part in parts for each in range(self._unit)]

    def _mixed(self, kept: Sequence[int]) -> Any:
        """Take the kept parts from the batch, and the others from its changed version."""
        changed = set(range(_NUM_PARTS)) - set(kept)
        if not changed:
            return self._batch
        leaves, spec = tree_flatten(self._batch)
        others, _ = tree_flatten(self._other)
        mixed = list(leaves)
        for index, place in enumerate(self._session.layout.dims):
            if place is None:
                continue
            mixed[index] = leaves[index].clone()
            rows = self._unit * place.per_sample
            for part in changed:
                target = mixed[index].narrow(place.dim, part * rows, rows)
                target.copy_(others[index].narrow(place.dim, part * rows, rows))
        return tree_unflatten(mixed, spec)

    def _are_alike(self, batch: Any) -> bool:
        """Say whether all parts of a batch hold the same."""
        parts = [
            tree_flatten(self._session.layout.selection(batch, self._samples((part,))))[0]
            for part in range(_NUM_PARTS)
        ]
        return all(
            torch.equal(first, other)
            for part in parts[1:]
            for first, other in zip(parts[0], part, strict=True)
            if isinstance(first, torch.Tensor)
        )


def open_probe(job: Job, layout: BatchLayout, unit: int) -> LossProbe:
    """Build a model and a batch of three parts of so many samples, and try the loss on one part.

    fp64 is tried first, then fp32, for models that insist on it.

    Raises:
        MemfitError: if the loss cannot be computed on a part.
    """
    with untouched_randomness():
        torch.manual_seed(0)
        batch = _small_batch(job, layout, _NUM_PARTS * unit)
        try:
            return _probe(job, layout, batch, unit, torch.float64)
        except (MemfitError, RuntimeError):
            torch.manual_seed(0)
            return _probe(job, layout, batch, unit, torch.float32)


def probe_cost(job: Job, layout: BatchLayout, unit: int) -> tuple[int, int]:
    """Predict the bytes and the operations that three parts of so many samples take in fp64.

    Raises:
        RecordingError: if the loss cannot be recorded.
    """
    try:
        return _recorded_cost(job, layout, unit, disguised=True)
    except ValuesNeededError:
        return _recorded_cost(job, layout, unit, disguised=False)


def _probe(job: Job, layout: BatchLayout, batch: Any, unit: int, dtype: torch.dtype) -> LossProbe:
    session = open_session(job, "cpu", layout, _no_gradients)
    _freeze_batch_norms(session.model)
    convert_model(session.model, dtype)
    _add_noise(session.model)
    probe = LossProbe(session, converted(batch, dtype), unit, dtype)
    probe.value((0,))
    return probe


def _no_gradients(*_: object) -> torch.Tensor:
    raise AssertionError("a probe computes no gradients")


def _small_batch(job: Job, layout: BatchLayout, num_samples: int) -> Any:
    """Build a batch of so many samples, or cut it from a whole one."""
    try:
        return real_batch(job, num_samples)
    except JobFunctionError:
        if job.batch_size <= num_samples:
            raise
        return layout.selection(real_batch(job, job.batch_size), range(num_samples))


def _recorded_cost(job: Job, layout: BatchLayout, unit: int, *, disguised: bool) -> tuple[int, int]:
    try:
        shapes = shapes_of(job, _NUM_PARTS * unit)
    except JobFunctionError:
        shapes = shapes_of(job, job.batch_size)
    with (
        virtual_tensors(disguised=disguised) as mode,
        Recorder() as recorder,
        borrowed_to_record(job, mode) as borrowed_job,
    ):
        session = open_session(borrowed_job, "cpu", layout, _no_gradients)
        sizes = {parameter.element_size() for parameter in session.model.parameters()}
        loss = session.loss_of(as_virtual(mode, shapes))
        del loss
    growth = max(1, 8 // min(sizes, default=8))
    num_bytes = peak_bytes(recorder.history, CPU_RULES) * growth
    return num_bytes, _NUM_EVALUATIONS * recorder.history.flops()


def _freeze_batch_norms(model: torch.nn.Module) -> None:
    """Have batch normalisation use fixed statistics, where it would take those of the batch."""
    for module in model.modules():
        if not isinstance(module, BatchNorm) or not module.training:
            continue
        module.training = False
        if module.running_mean is None:
            module.running_mean = torch.zeros(module.num_features)
            module.running_var = torch.ones(module.num_features)


def _add_noise(model: torch.nn.Module) -> None:
    """Move parameters a little: where a layer begins at zero, nothing depends on its input."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            size = _NOISE * parameter.abs() if parameter.any() else _NOISE_AT_ZERO
            parameter.add_(noise * size)


def _has_floats(layout: BatchLayout, batch: Any) -> bool:
    leaves, _ = tree_flatten(batch)
    return any(
        leaf.is_floating_point() and place is not None
        for leaf, place in zip(leaves, layout.dims, strict=True)
        if isinstance(leaf, torch.Tensor)
    )


def _perturbed(layout: BatchLayout, batch: Any) -> Any:
    """Add noise to the floating-point leaves that hold samples; it is never negative."""
    generator = torch.Generator().manual_seed(1)
    leaves, spec = tree_flatten(batch)
    changed = [
        leaf + 0.1 * torch.rand(leaf.shape, generator=generator, dtype=leaf.dtype)
        if place is not None and leaf.is_floating_point()
        else leaf
        for leaf, place in zip(leaves, layout.dims, strict=True)
    ]
    return tree_unflatten(changed, spec)
