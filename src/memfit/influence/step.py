"""One step of a scan, and its peak, predicted by recording that very step on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from memfit.devices.catalogue import load_device
from memfit.devices.spec import CPU, CUDA, Device
from memfit.errors import NoPlanFitsError
from memfit.figures import BOUNDED_FIGURES, Prediction
from memfit.job import Job
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.placed_recorder import card_of, recording_on
from memfit.prediction.predict import evaluate_steps
from memfit.prediction.recording import StepRecording
from memfit.prediction.refusals import clear_refusals, code_at_fault
from memfit.session.borrowing import borrowed_to_record
from memfit.trace.events import Phase
from memfit.trace.phases import StepFollower

from .choice import made_ready
from .gradients import GradientReader, SampleGradients
from .projection import ProjectedGradients, Projection
from .proof import NUM_PROVED, compare
from .samples import Samples

Gradients = SampleGradients | ProjectedGradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """How many samples a step takes at a time."""

    train: int
    test: int
    """Of a scan for self-influence 0."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """The samples of one side, and what reads their gradients."""

    reader: GradientReader
    samples: Samples
    projection: Projection | None

    def read(self, rows: Tensor) -> Gradients:
        """Read the gradients of some samples, rows (B,) int64."""
        found = self.reader.read(self.samples, rows)
        if self.projection is None:
            return found
        with torch.no_grad():
            return self.projection.of(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sides:
    """Both sides of a scan; one for self-influence has no test samples."""

    train: Side
    test: Side | None

    def held(self, rows: Tensor) -> Gradients:
        """Read the gradients of test samples, which are held while training samples pass."""
        assert self.test is not None, "asked for where there are test samples"
        return self.test.read(rows)

    def block(self, held: Gradients | None, rows: Tensor) -> Tensor:
        """Compare a chunk of training samples (B,) with what is held: (T, B), or (B,)."""
        found: Any = self.train.read(rows)
        limit_bytes = self.train.reader.limit_bytes
        with torch.no_grad():
            if held is None:
                norms: Tensor = found.squared_norms(limit_bytes)
                return norms
            products: Tensor = held.inner_products(found, limit_bytes)
            return products

    def step(self, chunks: Chunks) -> None:
        """Do one step on the first samples."""
        held = self.held(torch.arange(chunks.test)) if self.test is not None else None
        self.block(held, torch.arange(chunks.train))

    def each(self) -> Iterator[Side]:
        """Yield the sides that there are."""
        yield self.train
        if self.test is not None:
            yield self.test


def predict_proof(sides: Sides, device: str = CPU) -> Prediction:
    """Predict what the proof before the first step takes; nothing is run.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
        RecordingError: if it cannot be recorded.
    """

    def prove(found: Sides) -> None:
        for side in found.each():
            compare(side.reader, side.samples, torch.arange(min(NUM_PROVED, side.samples.count)))

    return _predicted(sides, Chunks(train=1, test=1), load_device(device), prove)


def predict_step(sides: Sides, chunks: Chunks, device: str = CPU) -> Prediction:
    """Predict what a step takes; nothing is run.

    Raises:
        UnknownDeviceError: if the catalogue has no such device.
        RecordingError: if the step cannot be recorded.
    """
    return _predicted(sides, chunks, load_device(device), lambda found: found.step(chunks))


def _predicted(
    sides: Sides, chunks: Chunks, spec: Device, step: Callable[[Sides], None]
) -> Prediction:
    batches = {}
    for side, size in zip(sides.each(), (chunks.train, chunks.test), strict=False):
        numbers = {1, min(NUM_PROVED, side.samples.count), size}
        batches[id(side)] = {each: _shapes_of(side.samples, each) for each in numbers}
    model = sides.train.reader.model
    job = Job(
        model=lambda: model,
        batch=lambda _: batches[id(sides.train)][1],
        loss=lambda found, _: next(found.parameters()).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=1,
    )
    card = card_of(spec)
    with (
        clear_refusals(),
        code_at_fault(card),
        recording_on(card) as (recorder, mode),
        StepFollower(recorder),
        borrowed_to_record(job, mode, CPU if card is None else CUDA) as borrowed,
    ):
        found = borrowed.model()

        def on(side: Side | None) -> Side | None:
            return None if side is None else _on_fakes(side, found, batches[id(side)])

        train = on(sides.train)
        assert train is not None, "there are always training samples"
        fakes = Sides(train=train, test=on(sides.test))
        with made_ready(found, fakes.train.reader.parameters):
            recorder.begin_step()
            recorder.enter_phase(Phase.FORWARD)
            step(fakes)
            recorder.end_step()
    recording = StepRecording(
        history=recorder.history, marks=recorder.marks, card=card, record_seconds=0.0
    )
    return evaluate_steps(recording, spec)


def _on_fakes(side: Side, model: nn.Module, batches: dict[int, Any]) -> Side:
    """Return a side whose model and samples are fake tensors."""
    every = dict(model.named_parameters())
    known = {name: every[name] for name in side.reader.parameters}
    unread = dict(side.reader.unread)
    reader = replace(side.reader, model=model, parameters=known, unread=unread, has_values=False)
    samples = Samples(count=side.samples.count, batch=lambda rows: _made(batches[len(rows)]))
    projection = side.projection and replace(side.projection, _drawn={})
    return replace(side, reader=reader, samples=samples, projection=projection)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What there is to know of a tensor without its values."""

    sizes: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _shapes_of(samples: Samples, number: int) -> Any:
    """Make a real batch, and keep of it nothing but the shapes."""

    def shape_of(tensor: Tensor) -> _Shape:
        return _Shape(
            sizes=tensor.shape, stride=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )

    return tree_map_only(Tensor, shape_of, samples.batch(torch.arange(number)))


def _made(shapes: Any) -> Any:
    """Make a batch of such shapes; under a fake mode of fake tensors."""

    def tensor_of(shape: _Shape) -> Tensor:
        return torch.empty_strided(
            shape.sizes, shape.stride, dtype=shape.dtype, device=shape.device
        )

    return tree_map_only(_Shape, tensor_of, shapes)


def check_proof(sides: Sides, budget_bytes: int, device: str = CPU) -> None:
    """Refuse a budget in which a few samples cannot be proved.

    Raises:
        NoPlanFitsError: if it is too small.
    """
    found = predict_proof(sides, device)
    if _bounded_bytes(found) > budget_bytes:
        remedy = (
            "Raise the budget, choose fewer parameters, or name those in unproved whose gradient "
            "is too large to be made once."
        )
        raise NoPlanFitsError(
            budget_bytes,
            _bounded_bytes(found),
            found.by_category,
            ["the proof on a few samples"],
            [remedy],
        )


def chunks_within(sides: Sides, largest: Chunks, budget_bytes: int, device: str = CPU) -> Chunks:
    """Find the largest chunks whose step stays within a budget, halving the larger of the two.

    Raises:
        NoPlanFitsError: if not even single samples fit.
    """
    chunks = largest
    while True:
        found = predict_step(sides, chunks, device)
        if _bounded_bytes(found) <= budget_bytes:
            return chunks
        if max(chunks.train, chunks.test) == 1:
            raise NoPlanFitsError(
                budget_bytes,
                _bounded_bytes(found),
                found.by_category,
                ["one sample at a time"],
                ["Raise the budget, or choose fewer parameters, such as the last layers."],
            )
        if chunks.train >= chunks.test:
            chunks = replace(chunks, train=(chunks.train + 1) // 2)
        else:
            chunks = replace(chunks, test=(chunks.test + 1) // 2)


def _bounded_bytes(found: Prediction) -> int:
    """Return what a budget bounds: allocated bytes on the CPU, those of the process on a card."""
    figure = BOUNDED_FIGURES[MemoryBudget().on(load_device(found.device)).of or "allocated"]
    num_bytes: int = getattr(found, figure)
    return num_bytes
