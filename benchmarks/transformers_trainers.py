"""Trainers as people write them, small enough for two cores; they know nothing of memfit."""

from __future__ import annotations

import tempfile
from typing import Any

import peft
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

NAMES = ("bert", "gpt2", "lora")
_VOCABULARY, _NUM_SAMPLES, _IGNORED = 1000, 256, -100


def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return the trainer of a name; always the same, without dropout."""
    quiet = {
        "output_dir": options.pop("output_dir", tempfile.gettempdir()),
        "max_steps": 20,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 5e-4,
        "warmup_steps": 4,
        "lr_scheduler_type": "cosine",
        "logging_steps": 5,
        "seed": 7,
    }
    sizes = {
        "bert": {"per_device_train_batch_size": 32},
        "gpt2": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
        "lora": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
    }[name]
    callbacks = options.pop("callbacks", None)
    rows = options.pop("rows", None) or samples(is_causal=name != "bert")
    set_seed(0)
    return Trainer(
        model=_MODELS[name]().to(dtype),
        args=TrainingArguments(**{**quiet, **sizes, **options}),
        train_dataset=rows,
        data_collator=padded,
        callbacks=callbacks,
    )


def _bert() -> Any:
    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def _gpt2() -> Any:
    config = GPT2Config(
        vocab_size=_VOCABULARY,
        n_embd=128,
        n_layer=4,
        n_head=4,
        n_positions=128,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def _lora() -> Any:
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(LlamaForCausalLM(config), adapters)


_MODELS = {"bert": _bert, "gpt2": _gpt2, "lora": _lora}


def samples(*, is_causal: bool) -> list[dict[str, Any]]:
    """Return texts of 8 to 64 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(8, 65, (_NUM_SAMPLES,), generator=generator).tolist()
    found = []
    for number, length in enumerate(lengths):
        ids = torch.randint(3, _VOCABULARY, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": ids if is_causal else number % 5})
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad texts to the longest of their batch."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(values: list[int], filling: int) -> list[int]:
        return values + [filling] * (longest - len(values))

    labels = [row["labels"] for row in rows]
    if isinstance(labels[0], list):
        labels = [filled(each, _IGNORED) for each in labels]
    return {
        "input_ids": torch.tensor([filled(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([filled([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor(labels),
    }
