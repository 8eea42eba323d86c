"""Writes DeepSpeed's configuration from a choice, and reads one that is there.

Keys and their meaning: deepspeed/runtime, config.py, constants.py and zero/config.py, of 0.19.8.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import ConfigFileError, UsageError
from memfit.files import write_atomically
from memfit.integrations.deepspeed.choice import BF16, CPU_MEMORY, FP16, FP32, NONE, ZeroChoice
from memfit.integrations.deepspeed.contradictions import contradictions, malformed
from memfit.journal.plain_text import parsed_json, read_plain

_TRAIN, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_AUTO = "auto"
_NEVER = 1_000_000_000
_NEEDED = {
    "managed_gradient_accumulation": False,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
"""Any number of passes in a step, and the client's own optimizer of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedConfig:
    """A configuration that memfit can run, what was changed in it, and the choice it stands for."""

    config: dict[str, Any]
    changes: tuple[str, ...]
    """One for each key that was changed or filled in, as ``key: before -> after``."""
    choice: ZeroChoice


def config_of(
    choice: ZeroChoice,
    *,
    batch_size: int,
    num_ranks: int,
    clip_grad_norm: float | None = None,
) -> dict[str, Any]:
    """Return a complete configuration for a choice, to be given to DeepSpeed or written as JSON.

    ``train_batch_size`` is micro-batch times accumulation times ranks, exactly.

    Args:
        choice: of stage, places and sizes.
        batch_size: the samples of one rank in one update.
        num_ranks: how many train together.
        clip_grad_norm: to which the norm of all gradients is clipped; None clips nothing.

    Raises:
        UsageError: if the micro-batch does not divide the batch.
    """
    micro = choice.micro_batch_size or batch_size
    if batch_size % micro:
        divisors = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
        near = ", ".join(map(str, sorted(divisors, key=lambda size: abs(size - micro))[:3]))
        raise UsageError(
            f"micro_batch_size is {micro}, which does not divide a rank's batch of {batch_size}: "
            f"DeepSpeed's {_TRAIN} could not be exact. Sizes that do: {near}."
        )
    config: dict[str, Any] = {
        _TRAIN: batch_size * num_ranks,
        _MICRO: micro,
        _ACCUMULATION: batch_size // micro,
        **_NEEDED,
        "gradient_clipping": clip_grad_norm or 0.0,
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
        "zero_optimization": _zero_section(choice),
    }
    if choice.precision in {BF16, FP16}:
        config[choice.precision] = {"enabled": True}
    if choice.precision == BF16 and choice.stage > 1:
        # In stage 1 this would choose another optimizer of DeepSpeed's (engine.py, BF16_Optimizer).
        config["data_types"] = {"grad_accum_dtype": FP32}
    return config


def _zero_section(choice: ZeroChoice) -> dict[str, Any]:
    section: dict[str, Any] = {
        "stage": choice.stage,
        "contiguous_gradients": choice.contiguous_gradients,
        "overlap_comm": choice.shards_weights,
        "reduce_scatter": True,
        "reduce_bucket_size": choice.reduce_bucket_elements,
        "allgather_bucket_size": choice.allgather_bucket_elements,
    }
    if choice.shards_weights:
        section |= {
            "stage3_prefetch_bucket_size": choice.prefetch_bucket_elements,
            "stage3_param_persistence_threshold": choice.persistence_elements,
            "stage3_max_live_parameters": choice.max_live_elements,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    places = {
        "offload_optimizer": choice.offload_optimizer,
        "offload_param": choice.offload_parameters,
    }
    for name, place in places.items():
        if place != NONE:
            section[name] = {"device": place}
            if place == CPU_MEMORY:
                section[name]["pin_memory"] = False
            else:
                section[name]["nvme_path"] = choice.nvme_folder
    return section


def write_config(config: Mapping[str, Any], path: str | Path) -> None:
    """Write a configuration as JSON, which ``deepspeed --deepspeed_config`` reads."""
    write_atomically(Path(path), f"{json.dumps(config, indent=2)}\n")


def adapted(
    given: Mapping[str, Any] | str | Path,
    *,
    batch_size: int,
    num_ranks: int,
    clip_grad_norm: float | None = None,
) -> AdaptedConfig:
    """Return a given configuration, changed only where a step could not be carried out otherwise.

    ``"auto"``, as transformers and Accelerate write it, is filled in.

    Args:
        given: DeepSpeed's configuration, or the JSON file that has it.
        batch_size: the samples of one rank in one update.
        num_ranks: how many train together.
        clip_grad_norm: of the job; None takes that of the configuration.

    Raises:
        ConfigFileError: if the file cannot be read.
        UsageError: if it contradicts the job, itself, or exact steps; each contradiction is named.
    """
    config = _read(given)
    _refuse(malformed(config))
    if clip_grad_norm is None:
        found = config.get("gradient_clipping", _AUTO)
        clip_grad_norm = None if found in (_AUTO, 0, None) else float(found)
    _refuse(
        contradictions(
            config, batch_size=batch_size, num_ranks=num_ranks, clip_grad_norm=clip_grad_norm
        )
    )
    choice = choice_of(config, batch_size)
    whole = config_of(
        choice, batch_size=batch_size, num_ranks=num_ranks, clip_grad_norm=clip_grad_norm
    )
    changes: list[str] = []
    _fill(config, whole, (_TRAIN, _MICRO, _ACCUMULATION, "gradient_clipping", *_NEEDED), changes)
    config.setdefault("steps_per_print", _NEVER)
    section = config.setdefault("zero_optimization", {})
    _fill(section, whole["zero_optimization"], ("overlap_comm",), changes)
    for key, value in whole["zero_optimization"].items():
        if section.get(key) == _AUTO:
            _fill(section, {key: value}, (key,), changes)
    for name in (BF16, FP16):
        if config.get(name, {}).get("enabled") == _AUTO:
            _fill(config[name], {"enabled": choice.precision == name}, ("enabled",), changes)
    return AdaptedConfig(config=config, changes=tuple(changes), choice=choice)


def _refuse(faults: Sequence[str]) -> None:
    """Refuse a configuration, if there is anything against it.

    Raises:
        UsageError: with all that there is.
    """
    if faults:
        raise UsageError(f"This configuration of DeepSpeed cannot be run: {' '.join(faults)}")


def choice_of(config: Mapping[str, Any], batch_size: int) -> ZeroChoice:
    """Return the choice that a configuration stands for.

    Args:
        config: DeepSpeed's.
        batch_size: the samples of one rank in one update.

    Raises:
        UsageError: if its parts contradict each other.
    """
    section = config.get("zero_optimization", {})
    micro, passes = config.get(_MICRO, _AUTO), config.get(_ACCUMULATION, _AUTO)
    if micro == _AUTO:
        micro = batch_size if passes == _AUTO else max(1, batch_size // passes)
    enabled = [name for name in (BF16, FP16) if config.get(name, {}).get("enabled") is True]
    numbers = {
        "reduce_bucket_elements": "reduce_bucket_size",
        "allgather_bucket_elements": "allgather_bucket_size",
        "prefetch_bucket_elements": "stage3_prefetch_bucket_size",
        "persistence_elements": "stage3_param_persistence_threshold",
        "max_live_elements": "stage3_max_live_parameters",
    }
    settings: dict[str, Any] = {
        name: int(section[key]) for name, key in numbers.items() if section.get(key, _AUTO) != _AUTO
    }
    places = {"offload_optimizer": "offload_optimizer", "offload_parameters": "offload_param"}
    for name, key in places.items():
        settings[name] = (section.get(key) or {}).get("device", NONE)
        settings["nvme_folder"] = (section.get(key) or {}).get("nvme_path") or settings.get(
            "nvme_folder"
        )
    return ZeroChoice(
        stage=section.get("stage", 0),
        micro_batch_size=micro,
        precision=enabled[0] if enabled else FP32,
        contiguous_gradients=section.get("contiguous_gradients", True) is not False,
        **settings,
    )


def _fill(
    section: dict[str, Any], wanted: Mapping[str, Any], keys: tuple[str, ...], changes: list[str]
) -> None:
    """Set keys to what is wanted, and note those that said something else."""
    for key in keys:
        if section.get(key) != wanted[key]:
            changes.append(f"{key}: {section.get(key, 'left out')} -> {wanted[key]}")
            section[key] = wanted[key]


def _read(given: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Return a copy of a configuration, or read it.

    Raises:
        ConfigFileError: if the file is missing, or no JSON object.
    """
    if isinstance(given, Mapping):
        return deepcopy(dict(given))
    try:
        found = parsed_json(read_plain(Path(given)))
    except (OSError, ValueError) as error:
        raise ConfigFileError(str(given), f"{type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigFileError(str(given), f"it holds a {type(found).__name__}, not an object")
    return found
