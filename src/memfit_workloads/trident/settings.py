"""What the flags of ``memfit train trident`` mean, as data. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit_workloads.memory_settings import EpochSettings, MemorySettings
from memfit_workloads.watching import WatchSettings

from .branches import BF16, FP16, BranchSettings, branch_settings
from .placement import PlacementSettings
from .sizes import PRESETS, TridentSizes

AUTO_BATCH = "auto"
BACKGROUNDS = PLAIN, REAL = ("plain", "real")
CLIP_FORMATS = NPY, MKV = ("npy", "mkv")
OPTIMIZERS = ADAMW, ADAMW_8BIT, PAGED_ADAMW_8BIT = ("adamw", "adamw8bit", "paged_adamw8bit")
DEFAULTS: Mapping[str, Any] = {
    "model": "demo",
    "num_clips": 512,
    "num_valid_clips": 192,
    "num_test_clips": 320,
    "data_seed": 0,
    "backgrounds": PLAIN,
    "clip_format": NPY,
    "num_workers": 0,
    "num_epochs": 12,
    "weight_decay": 0.05,
    "eval_every": 1,
    "random_seed": 42,
    "output_dir": Path("runs/trident"),
    "checkpoint_frequency": 2,
}
"""Of the flags that neither the command line nor a file gives."""
_DEMO_DEFAULTS: Mapping[str, Any] = {"num_clips": 768, "num_epochs": 10, "data_seed": 21}
"""Where ``--demo`` differs; chosen on the clips to validate on of the seeds 0 and 10."""
_LEARNING_RATES = {"demo": 2e-3, "document": 2e-4}
_EFFECTIVE_BATCH = 16
_DEMO_BUDGET = 0.5
_CHECKPOINTING = "activation-checkpointing"
_SPLITTING = "micro-batching"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Where clips come from."""

    jsonl: Path | None
    """None for generated clips."""
    valid_jsonl: Path | None
    test_jsonl: Path | None
    video_root: Path | None
    num_clips: int
    num_valid_clips: int
    num_test_clips: int
    data_seed: int
    backgrounds: str
    """Behind the shapes of generated clips."""
    write_clips: Path | None
    """Where to write generated clips, in place of a training."""
    clip_format: str
    num_workers: int
    pin_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TridentSettings(EpochSettings):
    """Everything that one training run is told."""

    data: DataSettings
    sizes: TridentSizes
    micro_batch_size: int | None
    """Fixed by the flags; None leaves it to the planner."""
    optimizer: str
    output_dir: Path
    learning_rate: float
    weight_decay: float
    placement: PlacementSettings
    branches: BranchSettings = field(default_factory=BranchSettings)


def settings_from(args: argparse.Namespace, command: str) -> TridentSettings:
    """Turn parsed flags into settings; those that are None get their defaults.

    Raises:
        UsageError: if flags contradict each other.
    """
    defaults = {**DEFAULTS, **_DEMO_DEFAULTS} if args.demo else DEFAULTS
    told = {**defaults, **{name: value for name, value in vars(args).items() if value is not None}}
    told.setdefault("learning_rate", _LEARNING_RATES[told["model"]])
    batch_size, micro_batch_size = _batch_sizes(told)
    branches = branch_settings(told)
    if branches.frozen and args.placement.is_qlora:
        msg = "--qlora packs blocks of the whole model, of which --freeze-branches trains a part. "
        raise UsageError(f"{msg}Leave one of them out.")
    if branches.frozen and args.placement.host_modules:
        msg = (
            "--device-map custom computes modules of the whole model on the host, of which "
            "--freeze-branches trains a part. Leave one of them out."
        )
        raise UsageError(msg)
    return TridentSettings(
        data=_data_settings(told),
        sizes=_sizes(told),
        memory_settings=_memory_settings(args, batch_size, micro_batch_size, branches.autocast),
        watching=WatchSettings.from_flags(args),
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        optimizer=told.get("optimizer") or ADAMW,
        placement=args.placement,
        early_stopping_patience=told.get("early_stopping_patience"),
        resume=told.get("resume_from_checkpoint"),
        command=command,
        overwrite=told["overwrite"],
        branches=branches,
        **{
            name: told[name]
            for name in (
                *("output_dir", "checkpoint_frequency", "num_epochs", "eval_every"),
                *("random_seed", "learning_rate", "weight_decay"),
            )
        },
    )


def _data_settings(told: Mapping[str, Any]) -> DataSettings:
    jsonl = told.get("jsonl")
    is_synthetic = told["synthetic"] or told["demo"]
    if is_synthetic and jsonl is not None:
        msg = "--jsonl brings its own clips; leave out --synthetic and --demo, or --jsonl."
        raise UsageError(msg)
    if jsonl is None and not is_synthetic:
        msg = "No clips to train on. Give --jsonl FILE, or --synthetic for generated ones."
        raise UsageError(msg)
    if jsonl is None and (told.get("valid_jsonl") or told.get("test_jsonl")):
        msg = "--valid-jsonl and --test-jsonl go with --jsonl, not with generated clips."
        raise UsageError(msg)
    if jsonl is not None and (told.get("write_clips") or told["backgrounds"] != PLAIN):
        msg = "--write-clips and --backgrounds go with generated clips, not with --jsonl."
        raise UsageError(msg)
    return DataSettings(
        jsonl=jsonl,
        valid_jsonl=told.get("valid_jsonl"),
        test_jsonl=told.get("test_jsonl"),
        video_root=told.get("video_root"),
        num_clips=told["num_clips"],
        num_valid_clips=told["num_valid_clips"],
        num_test_clips=told["num_test_clips"],
        data_seed=told["data_seed"],
        backgrounds=told["backgrounds"],
        write_clips=told.get("write_clips"),
        clip_format=told["clip_format"],
        num_workers=told["num_workers"],
        pin_memory=told["pin_memory"] and not told["no_pin_memory"],
    )


def _sizes(told: Mapping[str, Any]) -> TridentSizes:
    names = ("num_frames", "height", "width")
    given = {name: told[name] for name in names if name in told}
    return replace(PRESETS[told["model"]], **given)


def _batch_sizes(told: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the effective batch size, and the micro-batch where the flags fix it."""
    micro_batch_size, num_steps = told.get("batch_size"), told.get("grad_accum_steps")
    if micro_batch_size == AUTO_BATCH:
        if num_steps is not None:
            msg = (
                "--batch-size auto has the planner cut the clips of an update into micro-batches, "
                f"and --grad-accum-steps {num_steps} says into how many; leave one of them out."
            )
            raise UsageError(msg)
        micro_batch_size = None
    if micro_batch_size is None and num_steps is None:
        return _EFFECTIVE_BATCH, None
    num_steps = num_steps or 1
    # More steps alone leave an update as large as it is, and take less memory for each of them.
    micro_batch_size = micro_batch_size or max(1, _EFFECTIVE_BATCH // num_steps)
    return micro_batch_size * num_steps, micro_batch_size


def _memory_settings(
    args: argparse.Namespace, batch_size: int, micro_batch_size: int | None, autocast: str
) -> MemorySettings:
    """Turn the flags that name a strategy into strategies that the plan has, or has not."""
    if args.use_bf16 and args.use_fp16:
        msg = "--use-bf16 and --use-fp16 each choose the type of autocast; leave one of them out."
        raise UsageError(msg)
    is_eight_bit = args.optimizer in {ADAMW_8BIT, PAGED_ADAMW_8BIT}
    asked = {
        "bf16": autocast == BF16,
        "fp16": autocast == FP16,
        _CHECKPOINTING: args.checkpoint_every_layer,
        "eight-bit-optimizer": is_eight_bit,
    }
    forbidden = {
        _CHECKPOINTING: args.no_checkpointing,
        _SPLITTING: micro_batch_size == batch_size,
    }
    if args.plan and (micro_batch_size is not None or args.no_checkpointing):
        msg = (
            "--plan says how a step is carried out; leave out --batch-size, --grad-accum-steps and "
            "--no-checkpointing with it."
        )
        raise UsageError(msg)
    memory = MemorySettings.from_flags(args, [name for name, is_asked in asked.items() if is_asked])
    memory = replace(memory, forbid=tuple(name for name, is_set in forbidden.items() if is_set))
    has_bound = (memory.budget_bytes, memory.budget_fraction, memory.plan_file) != (None,) * 3
    if args.demo and not has_bound:
        memory = replace(memory, budget_fraction=_DEMO_BUDGET)
    return memory
