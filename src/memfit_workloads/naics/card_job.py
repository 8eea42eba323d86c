"""The training of one stage as ``memfit config`` predicts it: on a card, from this machine."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memfit import Job
from memfit_workloads.memory_settings import MemorySettings

from .building import data_of, module_of
from .config import CONF, DEFAULT, read_config, read_stages
from .inputs import read_inputs
from .settings import NaicsSettings
from .training import trainer_of

_STAGE = "01"
_NO_BUDGET = MemorySettings(
    device="cpu", budget_bytes=None, budget_fraction=None, allow=(), require=(), plan_file=None
)


def job_for(*, config_path: Path | None, batch_size: int, n_negatives: int) -> tuple[Any, Any, Any]:
    """Return trainer, module and data of a stage with so many anchors and negatives.

    Precision ``16-mixed`` is taken for ``bf16-mixed``, which this machine can record: tensors are
    of the same sizes, and the scale of gradients, a few bytes, is left out.

    Raises:
        DataError: if the configuration cannot be read.
        MissingExtraError: without the packages of the encoder.
    """
    settings = _settings(config_path, batch_size, n_negatives)
    data = data_of(settings, read_inputs(settings), settings.stages[0])
    return trainer_of(settings, "cpu"), module_of(settings), data


def step_job(*, config_path: Path | None, batch_size: int, n_negatives: int) -> Job:
    """Return the same step as a job, to be run on a card or on the CPU.

    Its optimizer is AdamW over all that learns, at one rate.

    Raises:
        DataError: if the configuration cannot be read.
        MissingExtraError: without the packages of the encoder.
    """
    settings = _settings(config_path, batch_size, n_negatives)
    data = data_of(settings, read_inputs(settings), settings.stages[0])
    template = module_of(settings)  # its weights are read from a file, which a recording does not
    is_mixed = settings.of("training.trainer.precision") == "bf16-mixed"

    def loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        kind = batch["paths"].device.type
        with torch.autocast(kind, torch.bfloat16, enabled=is_mixed):
            found: torch.Tensor = model.loss_terms(batch)["loss"]
            return found

    return Job(
        model=lambda: copy.deepcopy(template),
        batch=lambda size: data.make_step([tuple(pair) for pair in data.pairs[:size]]),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(
            parameters, lr=settings.of("training.learning_rate")
        ),
        batch_size=batch_size,
    )


def _settings(config_path: Path | None, batch_size: int, n_negatives: int) -> NaicsSettings:
    given = [
        f"data_loader.batch_size={batch_size}",
        "data_loader.num_workers=0",
        "training.trainer.accumulate_grad_batches=1",
    ]
    config = read_config(config_path or DEFAULT, on_cpu=False, given=given)
    trainer = config["training"]["trainer"]
    if trainer["precision"] == "16-mixed":
        trainer["precision"] = "bf16-mixed"
    (stage,) = read_stages([_STAGE], None, CONF)
    return NaicsSettings(
        config=config,
        stages=(replace(stage, n_negatives=n_negatives),),
        output_dir=Path(),
        memory_settings=_NO_BUDGET,
        overwrite=False,
        command="",
    )
