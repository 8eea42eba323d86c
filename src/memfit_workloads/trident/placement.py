"""What the flags of placement mean, as data. Imports no torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import UsageError

from .deepspeed_file import MICRO, STEPS, DeepspeedFile, read_deepspeed_file
from .placement_arguments import CUSTOM
from .shipped_files import found

HOST_MODULES = ("kinematics.features", "kinematics.geometry", "infrared.curves")
"""Of ``--device-map custom``: KineFeat, GeoMLP and CoolCurve3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """Where weights, optimizer states and activations may lie."""

    host_bytes: int | None
    offload_folder: Path | None
    device_map: str | None
    host_modules: tuple[str, ...]
    """Modules that compute on the host where that is not the device."""
    zero_stage: int | None
    offloads_states: bool
    """Whether the optimizer's states are to leave the device."""
    offloads_weights: bool
    is_qlora: bool
    deepspeed_config: Path | None
    between_ranks: tuple[str, ...]
    """Keys of the configuration that only matter between ranks."""
    remarks: tuple[str, ...]
    """What there is to say of the files."""


def with_placement(args: argparse.Namespace) -> argparse.Namespace:
    """Turn the flags of placement into ``args.placement``, and into the flags that they stand for.

    Raises:
        UsageError: if flags contradict each other or the configuration of DeepSpeed.
        DataError: if that cannot be read.
    """
    _check_ranks(os.environ)
    filled = argparse.Namespace(**vars(args))
    file, *remarks = _deepspeed_file(args)
    if args.config is not None:
        remarks.append(found(args.config)[1])
    if file is not None:
        _fill(filled, file)
    if args.max_gpu_mem is not None:
        for name, value in (("--budget", args.budget), ("--budget-fraction", args.budget_fraction)):
            if value is not None:
                msg = f"--max-gpu-mem and {name} both bound the device; leave one of them out."
                raise UsageError(msg)
        filled.budget = args.max_gpu_mem
    _check_beside_plan(args)
    if args.qlora and args.resume_from_checkpoint:
        msg = (
            "--qlora cannot go on from a checkpoint: packed weights are rounded anew in every run. "
            "Leave out --resume-from-checkpoint to start anew."
        )
        raise UsageError(msg)
    filled.placement = _settings(args, file, tuple(each for each in remarks if each))
    return filled


def _check_beside_plan(args: argparse.Namespace) -> None:
    """Refuse flags that would add strategies to a plan that is read.

    Raises:
        UsageError: if there are any.
    """
    flags = {"--qlora": args.qlora, "--device-map custom": args.device_map == CUSTOM}
    for flag in (name for name, is_given in flags.items() if is_given and args.plan):
        msg = f"--plan says which strategies to use; leave out {flag} with it."
        raise UsageError(msg)


def _settings(
    args: argparse.Namespace, file: DeepspeedFile | None, remarks: tuple[str, ...]
) -> PlacementSettings:
    stage = args.zero_stage if file is None else file.stage
    is_disk = file is not None and "nvme" in (file.optimizer_place, file.parameter_place)
    folder = args.offload_folder
    if file is not None and is_disk and folder is None:
        if file.disk_folder is None:
            msg = f"--deepspeed-config {file.path}: device nvme needs nvme_path, a folder on disk."
            raise UsageError(msg)
        folder = file.disk_folder
    return PlacementSettings(
        host_bytes=args.cpu_mem,
        offload_folder=folder,
        device_map=args.device_map,
        host_modules=HOST_MODULES if args.device_map == CUSTOM else (),
        zero_stage=stage,
        offloads_states=bool(stage) and (file is None or file.optimizer_place != "none"),
        offloads_weights=file is not None and file.parameter_place != "none",
        is_qlora=args.qlora,
        deepspeed_config=None if file is None else file.path,
        between_ranks=() if file is None else file.between_ranks,
        remarks=remarks,
    )


def _deepspeed_file(args: argparse.Namespace) -> tuple[DeepspeedFile | None, str | None]:
    if args.deepspeed_config is None:
        return None, None
    path, remark = found(args.deepspeed_config)
    return read_deepspeed_file(path), remark


def _fill(args: argparse.Namespace, file: DeepspeedFile) -> None:
    """Let the configuration say what flags leave open.

    Raises:
        UsageError: if the two contradict each other.
    """
    _fill_precision(args, file)
    if args.zero_stage not in (None, file.stage):
        raise _against(file, f"--zero-stage {args.zero_stage}", f"stage {file.stage}")
    counts: tuple[tuple[str, str, str, int | None], ...] = (
        ("batch_size", "--batch-size", MICRO, file.micro_batch_size),
        ("grad_accum_steps", "--grad-accum-steps", STEPS, file.num_steps),
    )
    for name, flag, key, value in counts:
        given = getattr(args, name)
        if value is not None and given not in (None, value):
            raise _against(file, f"{flag} {given}", f"{key} {value}")
        if value is not None and not args.plan:
            setattr(args, name, value)


def _fill_precision(args: argparse.Namespace, file: DeepspeedFile) -> None:
    if file.precision is None:
        return
    asked = {"--use-bf16": args.use_bf16, "--use-fp16": args.use_fp16, "--no-fp16": args.no_fp16}
    agreed = {"bf16": ("--use-bf16", "--no-fp16"), "fp16": ("--use-fp16",)}[file.precision]
    for flag, is_asked in asked.items():
        if is_asked and flag not in agreed:
            raise _against(file, flag, f"{file.precision}.enabled true")
    if not args.plan:
        setattr(args, f"use_{file.precision}", True)


def _against(file: DeepspeedFile, flag: str, entry: str) -> UsageError:
    return UsageError(
        f"{flag} contradicts {entry} of --deepspeed-config {file.path}; leave out one of the two."
    )


def _check_ranks(variables: Mapping[str, str]) -> None:
    """Refuse to be one of several ranks, which would each train a model of their own.

    Raises:
        UsageError: if a launcher has started several.
    """
    words: Any = variables.get("WORLD_SIZE", "1")
    if words.isdecimal() and int(words) > 1:
        msg = (
            f"WORLD_SIZE is {words}, and memfit train trident trains on one device: start one "
            "process (deepspeed --num_gpus 1). Ranks share this job in Python, with "
            "memfit.integrations.deepspeed.start(build_job(...), ZeroChoice(stage=2)) after "
            "pip install 'memfit[deepspeed]', or under a plan of memfit plan --ranks."
        )
        raise UsageError(msg)
