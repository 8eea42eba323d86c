"""``--deepspeed-config``: what a configuration of DeepSpeed says to a run on one process.

Keys and their meaning: deepspeed/runtime, config.py, constants.py and zero/config.py, of 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from memfit.errors import DataError, UsageError
from memfit.journal.plain_text import parsed_json, read_plain

from .placement_arguments import ZERO_STAGES

MICRO, STEPS, TRAIN = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
_AUTO, _NONE = "auto", "none"
_PLACES = (_NONE, "cpu", "nvme")
_WRONG_NAMES = {"micro_batch_per_gpu": MICRO, "micro_batch_size_per_gpu": MICRO}
_LIKE_OURS = (MICRO, STEPS, TRAIN, "zero_optimization", "bf16", "fp16", "gradient_clipping")
_BETWEEN_RANKS = (
    *("overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size"),
    *("allgather_partitions", "allgather_bucket_size", "round_robin_gradients"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepspeedFile:
    """What of a configuration concerns one process."""

    path: Path
    content: Mapping[str, Any]
    stage: int
    optimizer_place: str
    """``none`` (the device), ``cpu`` or ``nvme``."""
    parameter_place: str
    disk_folder: Path | None
    precision: str | None
    """``bf16``, ``fp16`` or None."""
    micro_batch_size: int | None
    num_steps: int | None
    between_ranks: tuple[str, ...]
    """Keys that only matter where several ranks exchange something."""


def read_deepspeed_file(path: Path) -> DeepspeedFile:
    """Read a configuration.

    Raises:
        DataError: if it cannot be read as a JSON object.
        UsageError: if a key or value cannot be, or two contradict each other.
    """
    content = _read(path)
    # DeepSpeed would pass over such a key without a word.
    for key in content:
        near = get_close_matches(key, _LIKE_OURS, n=1, cutoff=0.8)
        right = _WRONG_NAMES.get(key) or (near[0] if near else key)
        if key in _LIKE_OURS or right == key:
            continue
        raise _unusable(path, f"there is no key {key}; the one that DeepSpeed reads is {right}.")
    section = _object(path, content, "zero_optimization")
    stage = section.get("stage", 0)
    if stage not in ZERO_STAGES or isinstance(stage, bool):
        raise _unusable(path, f"zero_optimization.stage is {stage!r}; needed is 0, 1, 2 or 3.")
    enabled = [
        name for name in ("bf16", "fp16") if _object(path, content, name).get("enabled") is True
    ]
    if len(enabled) > 1:
        raise _unusable(path, "bf16.enabled and fp16.enabled are both true; leave one of them out.")
    states = _object(path, section, "offload_optimizer", "zero_optimization.")
    weights = _object(path, section, "offload_param", "zero_optimization.")
    disk_folder = states.get("nvme_path") or weights.get("nvme_path")
    return DeepspeedFile(
        path=path,
        content=content,
        stage=stage,
        optimizer_place=_place(path, states, "offload_optimizer"),
        parameter_place=_place(path, weights, "offload_param"),
        disk_folder=Path(disk_folder) if disk_folder else None,
        precision=enabled[0] if enabled else None,
        micro_batch_size=_count(path, content, MICRO),
        num_steps=_count(path, content, STEPS),
        between_ranks=tuple(name for name in _BETWEEN_RANKS if name in section),
    )


def check_beside_job(file: DeepspeedFile, batch_size: int, clip_grad_norm: float) -> None:
    """Refuse what contradicts the job, itself, or exact steps.

    Raises:
        UsageError: with each contradiction.
    """
    from memfit.integrations.deepspeed.contradictions import contradictions

    faults = contradictions(
        file.content, batch_size=batch_size, num_ranks=1, clip_grad_norm=clip_grad_norm
    )
    if faults:
        raise _unusable(file.path, " ".join(faults))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parsed_json(read_plain(path))
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}). Check the path and its permissions."
        raise DataError(str(path), reason) from None
    except ValueError as error:
        raise DataError(str(path), f"it is no JSON ({error}).") from None
    if not isinstance(content, dict):
        reason = f"found {type(content).__name__}, needed a JSON object."
        raise DataError(str(path), reason)
    return content


def _object(
    path: Path, content: Mapping[str, Any], name: str, within: str = ""
) -> Mapping[str, Any]:
    found = content.get(name) or {}
    if not isinstance(found, Mapping):
        raise _unusable(path, f"{within}{name} is {found!r}; needed is an object.")
    return found


def _place(path: Path, section: Mapping[str, Any], name: str) -> str:
    place = section.get("device", _NONE)
    if place not in _PLACES:
        words = ", ".join(_PLACES)
        raise _unusable(path, f"zero_optimization.{name}.device is {place!r}; there are: {words}.")
    return str(place)


def _count(path: Path, content: Mapping[str, Any], key: str) -> int | None:
    value = content.get(key, _AUTO)
    if value == _AUTO:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _unusable(path, f"{key} is {value!r}; needed is a whole number of at least 1.")
    return value


def _unusable(path: Path, reason: str) -> UsageError:
    return UsageError(f"--deepspeed-config {path}: {reason}")
