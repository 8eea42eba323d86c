"""One real step of each stage, held against its prediction and the guide's formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.devices.catalogue import current_device_name
from memfit.devices.detect import free_memory_bytes, host
from memfit.devices.spec import CPU
from memfit.errors import MemfitError
from memfit.units import format_bytes

from .card_settings import StageSettings, step_factory
from .lightning_messages import quiet_lightning

if TYPE_CHECKING:
    from memfit import Job

_NO_PACKAGES = (
    "--profile runs a step of the workload, whose packages are missing. Install them with "
    "`pip install 'memfit[naics]'`, or leave it out."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProfile:
    """What a step took here, and what it was expected to take."""

    stage: str
    device: str
    batch_size: int
    predicted_bytes: int
    measured_bytes: int
    expected_bytes: int
    """By the guide's formula, for the card."""


def profile(stages: Sequence[StageSettings], config_path: Path | None) -> list[StageProfile]:
    """Run one step of each stage on this machine's card, or on the CPU without one.

    On a card the bytes are those of the process; on the CPU those of tensors, of the same step.

    Raises:
        MemfitError: without the workload's packages, or where the CPU does not hold a step.
    """
    factory = step_factory()
    if factory is None:
        raise MemfitError(_NO_PACKAGES)
    name = current_device_name() if host().cuda_devices else CPU
    found = []
    for each in stages:
        with quiet_lightning():
            job = factory(
                config_path=config_path,
                batch_size=each.batch.micro_batch_size,
                n_negatives=each.n_negatives,
            )
            found.append(_profiled(each, job, name))
    return found


def _profiled(stage: StageSettings, job: Job, device: str) -> StageProfile:
    from memfit import measure, predict

    predicted = predict(job, device=device)
    if device == CPU:
        _check_room(stage, predicted.peak_allocated_bytes)
        measured_bytes = measure(job, device=CPU).peak_allocated_bytes
        predicted_bytes = predicted.peak_allocated_bytes
    else:
        measured = measure(job, device="cuda").process_bytes
        assert measured is not None, "a card tells what a process holds"
        measured_bytes, predicted_bytes = measured, predicted.process_bytes
    return StageProfile(
        stage=stage.stage,
        device=device,
        batch_size=stage.batch.micro_batch_size,
        predicted_bytes=predicted_bytes,
        measured_bytes=measured_bytes,
        expected_bytes=stage.estimate.total_bytes,
    )


def _check_room(stage: StageSettings, wanted_bytes: int) -> None:
    free_bytes = free_memory_bytes()
    if free_bytes is None or wanted_bytes <= free_bytes:
        return
    msg = (
        f"There is no CUDA card in this machine, so --profile runs on the CPU, and a step of stage "
        f"{stage.stage} with {stage.batch.micro_batch_size} anchors takes "
        f"{format_bytes(wanted_bytes)} there, of which {format_bytes(free_bytes)} are free. Leave "
        "it out, run it where the card is, or ask for a smaller card."
    )
    raise MemfitError(msg)
