"""The kinds of configuration files that memfit knows: which key holds what, and in which words.

Keys are those of the projects' documentation: transformers' TrainingArguments, Lightning's Trainer,
DeepSpeed's configuration JSON, Accelerate's ClusterConfig, axolotl's configuration reference and
LLaMA-Factory's examples, read in November 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """Say what a key holds; the words are those of a mapping file."""

    MICRO_BATCH = "micro_batch"
    """Samples of one pass on one device."""
    ACCUMULATION = "accumulation"
    """Passes between two updates."""
    TOTAL = "total"
    """The effective batch itself, over all devices."""
    DEVICES = "devices"
    NODES = "nodes"
    PRECISION = "precision"
    """A word, such as bf16-mixed."""
    BF16 = "bf16"
    """A switch."""
    FP16 = "fp16"
    """A switch."""
    CHECKPOINTING = "checkpointing"
    """A switch."""
    OPTIMIZER = "optimizer"
    """A word, such as adamw_torch_fused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of file."""

    name: str
    keys: Mapping[Role, tuple[str, ...]]
    """Dotted keys, one of which holds it; below the group of the anchor if there is one."""
    anchors: tuple[str, ...] = ()
    """Names that tell the group that all keys are in, wherever it is; without them, the file."""
    adds: frozenset[Role] = frozenset()
    """What is added under its first key where the file leaves it to the trainer's default."""
    adds_beside: frozenset[str] = frozenset()
    """What the group must hold already for something to be added there; empty for anything."""
    defaults: Mapping[Role, int] = field(default_factory=dict)
    """What the trainer takes where the file says nothing."""
    precisions: Mapping[str, str] = field(default_factory=dict)
    """The words for bf16, fp16 and pure-bf16."""
    optimizers: Mapping[str, str] = field(default_factory=dict)
    """The words for an optimizer's implementation, or its 8-bit version."""
    is_told: bool = False
    """Whether the user's mapping file describes it, so that each key has to be there."""


_BATCH = frozenset({Role.MICRO_BATCH, Role.ACCUMULATION})
_NEEDED_BY_TRAINERS = frozenset({Role.ACCUMULATION, Role.PRECISION})
TRAINER_NAMES = frozenset(
    {
        *("accumulate_grad_batches", "max_epochs", "max_steps", "precision", "devices"),
        *("accelerator", "gradient_clip_val"),
    }
)
"""Arguments of Lightning's Trainer."""
ACCELERATOR_NAMES = frozenset({"gradient_accumulation_steps", "mixed_precision"})
_SWITCHES = frozenset({Role.BF16, Role.FP16, Role.CHECKPOINTING, Role.OPTIMIZER})
_LIGHTNING_WORDS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "pure-bf16": "bf16-true"}

TRANSFORMERS = Kind(
    name="transformers TrainingArguments",
    anchors=("per_device_train_batch_size", "gradient_accumulation_steps", "output_dir"),
    keys={
        Role.MICRO_BATCH: ("per_device_train_batch_size",),
        Role.ACCUMULATION: ("gradient_accumulation_steps",),
        Role.BF16: ("bf16",),
        Role.FP16: ("fp16",),
        Role.CHECKPOINTING: ("gradient_checkpointing", "activation_checkpointing"),
        Role.OPTIMIZER: ("optim",),
    },
    adds=_BATCH | _SWITCHES,
    defaults={Role.MICRO_BATCH: 8, Role.ACCUMULATION: 1},
    optimizers={
        "eight-bit": "adamw_bnb_8bit",
        "fused": "adamw_torch_fused",
        "foreach": "adamw_torch",
    },
)
LLAMA_FACTORY = Kind(
    name="LLaMA-Factory",
    anchors=TRANSFORMERS.anchors,
    keys=TRANSFORMERS.keys,
    adds=TRANSFORMERS.adds,
    defaults=TRANSFORMERS.defaults,
    optimizers=TRANSFORMERS.optimizers,
)
AXOLOTL = Kind(
    name="axolotl",
    keys={
        Role.MICRO_BATCH: ("micro_batch_size",),
        Role.ACCUMULATION: ("gradient_accumulation_steps",),
        Role.BF16: ("bf16",),
        Role.FP16: ("fp16",),
        Role.CHECKPOINTING: ("gradient_checkpointing",),
        Role.OPTIMIZER: ("optimizer",),
    },
    adds=_BATCH | _SWITCHES,
    defaults={Role.MICRO_BATCH: 1, Role.ACCUMULATION: 1},
    optimizers=TRANSFORMERS.optimizers,
)
DEEPSPEED = Kind(
    name="DeepSpeed",
    keys={
        Role.MICRO_BATCH: ("train_micro_batch_size_per_gpu",),
        Role.ACCUMULATION: ("gradient_accumulation_steps",),
        Role.TOTAL: ("train_batch_size",),
        Role.BF16: ("bf16.enabled",),
        Role.FP16: ("fp16.enabled",),
    },
    adds=_BATCH | {Role.BF16, Role.FP16},
)
ACCELERATE = Kind(
    name="Accelerate",
    keys={
        Role.ACCUMULATION: (
            "deepspeed_config.gradient_accumulation_steps",
            "gradient_accumulation_steps",
        ),
        Role.DEVICES: ("num_processes",),
        Role.PRECISION: ("mixed_precision",),
    },
    precisions={"bf16": "bf16", "fp16": "fp16"},
)
_TRAINERS = ("training.trainer", "trainer", "training", "train")
HYDRA = Kind(
    name="Lightning and Hydra",
    keys={
        Role.MICRO_BATCH: (
            *("data_loader.batch_size", "dataloader.batch_size", "datamodule.batch_size"),
            *("data.batch_size", "data.init_args.batch_size", "data.train_dataloader.batch_size"),
            *("data_loader.train.batch_size", "training.batch_size", "train.batch_size"),
            *("trainer.batch_size", "batch_size"),
        ),
        Role.ACCUMULATION: (
            *(f"{group}.accumulate_grad_batches" for group in _TRAINERS),
            *(f"{group}.gradient_accumulation_steps" for group in _TRAINERS),
            *("accumulate_grad_batches", "gradient_accumulation_steps"),
        ),
        Role.PRECISION: tuple(f"{group}.precision" for group in _TRAINERS),
        Role.DEVICES: tuple(f"{group}.devices" for group in _TRAINERS),
        Role.NODES: tuple(f"{group}.num_nodes" for group in _TRAINERS),
        Role.CHECKPOINTING: (
            *("model.gradient_checkpointing", "model.lora.gradient_checkpointing"),
            *("training.gradient_checkpointing", "model.init_args.gradient_checkpointing"),
        ),
    },
    defaults={Role.ACCUMULATION: 1},
    adds=_NEEDED_BY_TRAINERS,
    adds_beside=TRAINER_NAMES,
    precisions=_LIGHTNING_WORDS,
)
LIGHTNING_PYTHON = Kind(
    name="Lightning's Trainer in Python",
    keys={
        Role.MICRO_BATCH: ("DataLoader.batch_size", "BATCH_SIZE", "batch_size"),
        Role.ACCUMULATION: ("Trainer.accumulate_grad_batches",),
        Role.PRECISION: ("Trainer.precision",),
        Role.DEVICES: ("Trainer.devices",),
        Role.NODES: ("Trainer.num_nodes",),
    },
    defaults={Role.ACCUMULATION: 1},
    adds=_NEEDED_BY_TRAINERS,
    adds_beside=TRAINER_NAMES,
    precisions=_LIGHTNING_WORDS,
)
ACCELERATE_PYTHON = Kind(
    name="Accelerate in Python",
    keys={
        Role.MICRO_BATCH: ("DataLoader.batch_size", "BATCH_SIZE", "batch_size"),
        Role.ACCUMULATION: ("Accelerator.gradient_accumulation_steps",),
        Role.PRECISION: ("Accelerator.mixed_precision",),
    },
    defaults={Role.ACCUMULATION: 1},
    adds=_NEEDED_BY_TRAINERS,
    adds_beside=ACCELERATOR_NAMES,
    precisions=ACCELERATE.precisions,
)
STAGE = Kind(name="curriculum stage", keys={})
CHAIN = Kind(name="chain of curriculum stages", keys={})
