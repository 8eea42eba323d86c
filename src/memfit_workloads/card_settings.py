"""Training settings for a card: what the NAICS guide's command works out, per curriculum stage.

The largest micro-batch comes from the guide's formula (``reference_estimate``). Unlike the guide,
micro-batch x devices x accumulation is the wanted effective batch exactly. memfit's own prediction
of each stage, made by ``memfit_workloads.naics.card_job``, stands beside the formula and decides.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memfit.configfile.batches import Batch, largest_exact_micro_batch, split_exactly
from memfit.devices.catalogue import catalogue_name, load_device
from memfit.devices.detect import host
from memfit.devices.occupancy import CardProcess, ManagedCard
from memfit.errors import MemfitError, NoExactFactorsError
from memfit.units import GIB

from .lightning_messages import quiet_lightning
from .reference_estimate import (
    PRINTED_GIB,
    SAFETY_MARGIN,
    STAGES,
    MemoryEstimate,
    ModelConfig,
    TrainingConfig,
    estimate_memory_usage,
    largest_batch_size,
)

if TYPE_CHECKING:
    from memfit import Job, Prediction

TARGET = 256
LITTLE_FRACTION = 0.5
_MOST_PREDICTIONS = 6
_OWN_PACKAGES = ("memfit", "memfit_workloads", "torch")
_FACTORY_MODULE = "memfit_workloads.naics.card_job"
_PRINTED_TOLERANCE_FRACTION = 0.03
NO_CARD = (
    "There is no CUDA card in this machine, so --auto has nothing to detect. Say how much memory "
    "the card has with --gpu-memory 24, or name it with --device quadro-rtx-6000."
)


class JobFactory(Protocol):
    """Make what a stage trains, as its configuration says."""

    def __call__(
        self, *, config_path: Path | None, batch_size: int, n_negatives: int
    ) -> Job | tuple[Any, Any, Any]:
        """Return the job of one micro-batch, or Lightning's (Trainer, module, data) for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The card that settings are for."""

    title: str
    memory_bytes: int
    free_bytes: int | None = None
    """None where no card was looked at."""
    device: str | None = None
    """Its name in memfit's catalogue."""
    other_processes: tuple[CardProcess, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """Return what may be used before the safety margin is left."""
        return self.memory_bytes if self.free_bytes is None else self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """The settings of a stage, and what the formula expects of them."""

    stage: str
    n_positives: int
    n_negatives: int
    most_samples: int
    """The largest micro-batch that fits by the formula."""
    batch: Batch
    estimate: MemoryEstimate
    guide_batch: Batch
    """What the guide itself suggests, on one device; its product can miss the target."""
    guide_estimate: MemoryEstimate
    prediction: Prediction | None = None
    """memfit's own of one micro-batch; None where the workload gives no job."""
    too_large: tuple[tuple[int, int], ...] = ()
    """Micro-batches that the formula would have, with the bytes that memfit predicts for them."""

    def used_bytes(self) -> int:
        """Return what is expected: memfit's prediction, and the formula's figure without one."""
        return (
            self.estimate.total_bytes if self.prediction is None else self.prediction.process_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asks for."""

    effective_size: int = TARGET
    num_devices: int = 1
    safety_margin: float = SAFETY_MARGIN


def detected_card() -> Card:
    """Look at the first card of this machine: its memory, what is free, and who holds the rest.

    Raises:
        MemfitError: if there is none.
    """
    machine = host()
    if not machine.cuda_devices:
        raise MemfitError(NO_CARD)
    first = machine.cuda_devices[0]
    managed = ManagedCard.find(_first_uuid())
    occupancy = managed.occupancy() if managed else None
    others = managed.processes() if managed else ()
    return Card(
        title=first.name,
        memory_bytes=first.memory_bytes,
        free_bytes=first.memory_bytes - occupancy.card_bytes if occupancy else None,
        device=catalogue_name(first),
        other_processes=tuple(each for each in others if each.pid != os.getpid()),
    )


def _first_uuid() -> str | None:
    """Return the identifier of the first card, by which the driver tells cards apart."""
    import torch

    found = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return None if found is None else str(found)


def named_card(name: str) -> Card:
    """Take a card from the catalogue.

    Raises:
        UnknownDeviceError: if it is not there.
    """
    device = load_device(name)
    return Card(title=device.title, memory_bytes=device.memory_bytes, device=device.name)


def card_of(memory_bytes: int) -> Card:
    """Make up a card of so much memory."""
    return Card(title=f"a card of {memory_bytes / GIB:g} GB", memory_bytes=memory_bytes)


def settings_for(card: Card, wanted: Wanted, model_cfg: ModelConfig) -> list[StageSettings]:
    """Choose the settings of each stage.

    Raises:
        NoExactFactorsError: if no micro-batch gives the effective batch exactly.
        UsageError: if not even one sample fits, or the margin is no fraction.
    """
    available_bytes = _available_bytes(card, wanted)
    return [_stage(name, wanted, available_bytes, model_cfg) for name in STAGES]


def _available_bytes(card: Card, wanted: Wanted) -> int:
    # What others hold is gone; the margin is one of the whole card, as in the guide.
    return min(card.memory_bytes, round(card.usable_bytes / wanted.safety_margin))


def with_predictions(
    stages: Sequence[StageSettings],
    card: Card,
    wanted: Wanted,
    model_cfg: ModelConfig,
    config_path: Path | None,
) -> list[StageSettings]:
    """Have memfit predict each stage on the card, where workload and catalogue know them.

    A micro-batch that does not fit by the prediction is replaced by the largest that does and gives
    the effective batch exactly, or by one sample.
    """
    factory = None if card.device is None else job_factory()
    if factory is None:
        return list(stages)
    limit_bytes = int(wanted.safety_margin * _available_bytes(card, wanted))

    def predicted(stage: StageSettings) -> StageSettings:
        with quiet_lightning():
            made = factory(
                config_path=config_path,
                batch_size=stage.batch.micro_batch_size,
                n_negatives=stage.n_negatives,
            )
            return replace(stage, prediction=_predicted(made, card.device or ""))

    def fitting(stage: StageSettings) -> StageSettings:
        found = predicted(stage)
        for _ in range(_MOST_PREDICTIONS):
            smaller = _smaller_batch(found, limit_bytes, wanted)
            if smaller is None:
                break
            found = predicted(_with_batch(found, smaller, model_cfg))
        return found

    return [fitting(stage) for stage in stages]


def _smaller_batch(stage: StageSettings, limit_bytes: int, wanted: Wanted) -> Batch | None:
    """Return what to try in place of a micro-batch that is too large; None if it is not."""
    size, used_bytes = stage.batch.micro_batch_size, stage.used_bytes()
    if used_bytes <= limit_bytes or size == 1:
        return None
    most = max(1, min(size - 1, int(size * limit_bytes / used_bytes)))
    return exact_batch(wanted, most)


def _with_batch(stage: StageSettings, batch: Batch, model_cfg: ModelConfig) -> StageSettings:
    train_cfg = TrainingConfig(
        n_positives=stage.n_positives,
        n_negatives=stage.n_negatives,
        batch_size=batch.micro_batch_size,
    )
    return replace(
        stage,
        batch=batch,
        estimate=estimate_memory_usage(model_cfg, train_cfg),
        too_large=(*stage.too_large, (stage.batch.micro_batch_size, stage.used_bytes())),
        prediction=None,
    )


def _predicted(made: Job | tuple[Any, Any, Any], device: str) -> Prediction:
    if isinstance(made, tuple):
        from memfit.integrations.lightning import predict as predict_training

        return predict_training(*made, device=device)
    from memfit import predict

    return predict(made, device=device)


def job_factory() -> JobFactory | None:
    """Find what makes the workload's training; None without the packages that it takes."""
    found: JobFactory | None = _made_by_the_workload("job_for")
    return found


def step_factory() -> Callable[..., Job] | None:
    """Find what makes one step of the workload's training; None without its packages."""
    found: Callable[..., Job] | None = _made_by_the_workload("step_job")
    return found


def _made_by_the_workload(name: str) -> Any | None:
    try:
        module = importlib.import_module(_FACTORY_MODULE)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OWN_PACKAGES:
            raise
        return None
    return getattr(module, name)


def printed_gib(card: Card) -> float | None:
    """Return what the guide prints for the first stage on such a card, empty; None for others."""
    if card.other_processes:
        return None
    for memory_gib, printed in PRINTED_GIB.items():
        difference_bytes = abs(card.memory_bytes - memory_gib * GIB)
        if difference_bytes <= _PRINTED_TOLERANCE_FRACTION * memory_gib * GIB:
            return printed
    return None


def _stage(
    name: str, wanted: Wanted, available_bytes: int, model_cfg: ModelConfig
) -> StageSettings:
    n_positives, n_negatives = STAGES[name]
    train_cfg = TrainingConfig(n_positives=n_positives, n_negatives=n_negatives)
    most = largest_batch_size(available_bytes, model_cfg, train_cfg, wanted.safety_margin)
    batch = exact_batch(wanted, most)
    guide_batch = Batch(
        micro_batch_size=most,
        accumulation=max(1, wanted.effective_size // most),
        num_devices=1,
    )
    return StageSettings(
        stage=name,
        n_positives=n_positives,
        n_negatives=n_negatives,
        most_samples=most,
        batch=batch,
        estimate=estimate_memory_usage(
            model_cfg, replace(train_cfg, batch_size=batch.micro_batch_size)
        ),
        guide_batch=guide_batch,
        guide_estimate=estimate_memory_usage(model_cfg, replace(train_cfg, batch_size=most)),
    )


def exact_batch(wanted: Wanted, most_samples: int) -> Batch:
    """Choose the largest micro-batch that gives the effective batch exactly.

    Raises:
        NoExactFactorsError: if the devices do not divide it; the nearest that they do are named.
    """
    size, devices = wanted.effective_size, wanted.num_devices
    micro = largest_exact_micro_batch(size, most_samples, devices)
    if micro is not None:
        return split_exactly(size, micro, devices)
    near = [devices * (size // devices), devices * (size // devices + 1)]
    offers = []
    for each in near:
        if found := largest_exact_micro_batch(each, most_samples, devices):
            product = split_exactly(each, found, devices).product()
            offers.append(f"--target-effective-batch {each} ({product})")
    raise NoExactFactorsError(f"An effective batch of {size} on {devices} devices", offers)
