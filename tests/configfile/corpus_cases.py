"""What one plan changes in each file of the corpus, worked out by hand.

The plan has micro-batches of 4, bf16 and activation checkpointing. Files and their text are our own,
in the manner of those that such projects have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
PLAN = """memfit_plan: 1
device: t4
strategies:
- name: activation-checkpointing
- name: micro-batching
  micro_batch_size: 4
- name: bf16
"""


@dataclass(frozen=True)
class Case:
    file: str
    changes: dict[str, Any]
    """Each value that differs afterwards; the parts of a key are parted by slashes."""
    mapping: str = ""
    companion: str = ""
    """Another file that is named beside it."""
    kinds: list[str] = field(default_factory=list)


def hydra(name: str, micro: str, accumulation: str, steps: int, **changes: Any) -> Case:
    return Case(f"hydra/{name}", {micro: 4, accumulation: steps, **_slashed(changes)})


def arguments(name: str, steps: int, group: str = "", **changes: Any) -> Case:
    numbers = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": steps,
        "bf16": True,
        "gradient_checkpointing": True,
    }
    return Case(name, {f"{group}{key}": value for key, value in (numbers | changes).items()})


def deepspeed(name: str, steps: int, **changes: Any) -> Case:
    numbers = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": steps}
    return Case(f"deepspeed/{name}", numbers | _slashed({"bf16__enabled": True} | changes))


def axolotl(name: str, steps: int, **changes: Any) -> Case:
    numbers = {"micro_batch_size": 4, "gradient_accumulation_steps": steps, "bf16": True}
    return Case(f"axolotl/{name}", numbers | {"gradient_checkpointing": True} | changes)


def accelerate(name: str, **changes: Any) -> Case:
    changed = {"mixed_precision": "bf16"} | _slashed(changes)
    return Case(f"accelerate/{name}", changed, companion="transformers/fp16_before.yaml")


def mapped(name: str, mapping: str, **changes: Any) -> Case:
    return Case(name, _slashed(changes), mapping=mapping)


def _slashed(changes: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "/"): value for key, value in changes.items()}


LIGHTNING = {"trainer__precision": "bf16-mixed"}
DATA, STEPS = "data/batch_size", "trainer/accumulate_grad_batches"
CASES = [
    hydra(
        "naics.yaml",
        "data_loader/batch_size",
        "training/trainer/accumulate_grad_batches",
        55,
        training__trainer__precision="bf16-mixed",
        model__gradient_checkpointing=True,
    ),
    hydra(
        "naics_two_gpus.yml",
        "data_loader/batch_size",
        "training/trainer/accumulate_grad_batches",
        8,
        training__trainer__precision="bf16-mixed",
        model__gradient_checkpointing=True,
    ),
    hydra("lightning_template.yaml", DATA, STEPS, 32, **LIGHTNING),
    hydra("odd_indentation.yaml", DATA, STEPS, 3, **LIGHTNING),
    hydra("lightning_cli.yaml", "data/init_args/batch_size", STEPS, 4, **LIGHTNING),
    hydra("lightning_cli_devices_list.yaml", DATA, STEPS, 8),
    hydra("devices_string.yaml", "datamodule/batch_size", STEPS, 6, **LIGHTNING),
    hydra("interpolations.yaml", DATA, STEPS, 16, **LIGHTNING),
    hydra("long_lists.yaml", DATA, STEPS, 2, **LIGHTNING),
    hydra("anchors_apart.yaml", DATA, STEPS, 6, **LIGHTNING),
    hydra(
        "flat.yaml",
        "batch_size",
        "accumulate_grad_batches",
        16,
        training__precision="bf16-mixed",
    ),
    hydra("torchtune_like.yaml", "batch_size", "gradient_accumulation_steps", 4),
    hydra(
        "bom_and_tabs_in_comments.yaml",
        "data_loader/batch_size",
        "training/accumulate_grad_batches",
        3,
        training__precision="bf16-mixed",
    ),
    hydra("no_accumulation.yaml", DATA, STEPS, 5, **LIGHTNING),
    hydra("document_marks.yaml", DATA, STEPS, 5, **LIGHTNING),
    arguments("transformers/summarization.yaml", 8),
    arguments("transformers/defaults_left_out.yaml", 2),
    arguments("transformers/fp16_before.yaml", 8, fp16=False),
    arguments("transformers/sft.yaml", 4),
    arguments("transformers/args.json", 8),
    arguments("transformers/args_tabs.json", 2),
    arguments("transformers/args_one_line.json", 12),
    arguments("transformers/args_bom.json", 16),
    arguments("transformers/nested.yaml", 9, "experiment/training_args/"),
    arguments("transformers/flow.yaml", 4, "trainer_args/"),
    arguments("transformers/two_documents.yaml", 16, "1/"),
    arguments("transformers/args.toml", 8),
    arguments("transformers/nested.toml", 8, "training/"),
    arguments(
        "transformers/quoted_numbers.yaml",
        4,
        per_device_train_batch_size="4",
        gradient_accumulation_steps="4",
    ),
    arguments("transformers/sequence_item.yaml", 4, "runs/0/args/0/"),
    arguments("python/trainer.py", 4, "TrainingArguments/"),
    arguments("python/one_line.py", 4, "Seq2SeqTrainingArguments/", fp16=False),
    arguments("python/sft_config.py", 2, "SFTConfig/"),
    Case(
        "python/lightning.py",
        {
            "BATCH_SIZE": 4,
            "Trainer/accumulate_grad_batches": 8,
            "Trainer/precision": "bf16-mixed",
        },
    ),
    Case(
        "python/accelerate_loop.py",
        {
            "DataLoader/batch_size": 4,
            "Accelerator/gradient_accumulation_steps": 8,
            "Accelerator/mixed_precision": "bf16",
        },
    ),
    mapped(
        "python/data_class.py",
        'micro_batch = "TrainConfig.batch_size"\naccumulation = "TrainConfig.grad_accum"\n'
        'precision = "TrainConfig.amp"\n[precision_words]\nbf16 = "on"\n',
        batch_size=4,
        grad_accum=16,
        amp="on",
    ),
    mapped(
        "python/arguments.py",
        'micro_batch = "add_argument.batch_size.default"\n'
        'accumulation = "add_argument.grad_accum.default"\n',
        **{"--batch-size__default": 4, "--grad-accum__default": 8},
    ),
    mapped(
        "python/settings_dict.py",
        'micro_batch = "CONFIG.loader.size"\naccumulation = "CONFIG.every"\n',
        size=4,
        every=8,
    ),
    deepspeed("zero2.json", 8),
    deepspeed("only_total.json", 8, fp16__enabled=False),
    deepspeed("micro_and_steps.json", 8),
    deepspeed("total_and_micro.json", 64),
    deepspeed("total_and_steps.json", 12),
    deepspeed("yaml_form.yaml", 8),
    deepspeed("long_list.json", 2),
    Case("deepspeed/zero3_auto.json", {}, companion="transformers/summarization.yaml"),
    accelerate("single.yaml"),
    accelerate("multi.yaml"),
    accelerate("deepspeed.yaml", deepspeed_config__gradient_accumulation_steps=8),
    accelerate("fsdp.yaml"),
    accelerate("default.json"),
    axolotl("lora.yml", 8),
    axolotl("qlora.yaml", 4, bf16="auto"),
    axolotl("full.yaml", 4),
    axolotl("quoted.yaml", 3),
    axolotl("anchored_data.yaml", 3),
    axolotl("odd.yaml", 5),
    arguments("llamafactory/lora_sft.yaml", 2),
    arguments("llamafactory/full_dpo.yaml", 4, fp16=False),
    arguments("llamafactory/pretrain.yaml", 6),
    arguments("llamafactory/kto.json", 3),
    arguments("llamafactory/reward.yaml", 5),
    mapped(
        "mapped/yolo_like.yaml",
        "micro_batch: loader.size\naccumulation: loop.every\nprecision: amp\n"
        "checkpointing: remat\nprecision_words: {bf16: bfloat16}\n",
        loader__size=4,
        loop__every=16,
        amp="bfloat16",
        remat=True,
    ),
    mapped(
        "mapped/paddle_like.yml",
        'micro_batch = "TrainReader.batch_size"\naccumulation = "accumulate"\n',
        TrainReader__batch_size=4,
        accumulate=6,
    ),
    mapped(
        "mapped/detector.toml",
        'micro_batch = "train.batch"\naccumulation = "train.accumulate"\n'
        'precision = "train.dtype"\nprecision_words = {bf16 = "bfloat16"}\n',
        train__batch=4,
        train__accumulate=16,
        train__dtype="bfloat16",
    ),
    mapped(
        "mapped/espnet_like.yaml",
        'micro_batch = "batch_size"\naccumulation = "accum_grad"\n',
        batch_size=4,
        accum_grad=20,
    ),
    mapped(
        "mapped/fairseq_like.json",
        'micro_batch = "dataset.batch_size"\naccumulation = "optimization.update_freq"\n',
        dataset__batch_size=4,
        optimization__update_freq=6,
    ),
    mapped(
        "mapped/settings.py",
        'micro_batch = "batch"\naccumulation = "accumulate"\nprecision = "mixed"\n'
        '[precision_words]\nbf16 = "bf16"\n',
        batch=4,
        accumulate=12,
        mixed="bf16",
    ),
]
