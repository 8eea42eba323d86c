"""Small Trainers of transformers on the CPU, and data of unlike lengths."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

NUM_TOKENS, NUM_CLASSES, PAD, IGNORED = 60, 3, 0, -100
_SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(dtype: torch.dtype = torch.float64, kind: Any = BertForSequenceClassification) -> Any:
    """Return a classifier of texts."""
    set_seed(0)
    config = BertConfig(
        vocab_size=NUM_TOKENS,
        num_attention_heads=2,
        max_position_embeddings=32,
        num_labels=NUM_CLASSES,
        **_SIZES,
        **_NO_DROPOUT,
    )
    return kind(config).to(dtype)


def tagger(dtype: torch.dtype = torch.float64) -> Any:
    """Return a classifier of tokens."""
    return bert(dtype, BertForTokenClassification)


def llama(dtype: torch.dtype = torch.float64) -> Any:
    """Return a causal model."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_TOKENS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        **_SIZES,
    )
    return LlamaForCausalLM(config).to(dtype)


def lora(dtype: torch.dtype = torch.float64) -> Any:
    """Return a causal model with low-rank adapters."""
    import peft

    model = llama(dtype)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).to(dtype)


def texts(num_samples: int, labels: str = "class") -> list[dict[str, Any]]:
    """Return token ids of unlike lengths with labels of a kind, the same every time."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(num_samples):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        ids = torch.randint(3, NUM_TOKENS, (length,), generator=generator).tolist()
        tags = torch.randint(0, NUM_CLASSES, (length,), generator=generator).tolist()
        kinds = {
            "class": int(tags[0]),
            "tokens": ids,
            "tags": [tag if place % 3 else IGNORED for place, tag in enumerate(tags)],
        }
        found.append({"input_ids": ids, "labels": kinds[labels]})
    return found


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad texts to the longest of their batch."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(values: list[int], filling: int) -> list[int]:
        return values + [filling] * (longest - len(values))

    labels = [row["labels"] for row in rows]
    if isinstance(labels[0], list):
        labels = [filled(each, IGNORED) for each in labels]
    return {
        "input_ids": torch.tensor([filled(row["input_ids"], PAD) for row in rows]),
        "attention_mask": torch.tensor([filled([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor(labels),
    }


LABELS = {"bert": "class", "tagger": "tags", "llama": "tokens", "lora": "tokens"}
MODELS: dict[str, Any] = {"bert": bert, "tagger": tagger, "llama": llama, "lora": lora}


def trainer(name: str = "bert", kind: Any = Trainer, **options: Any) -> Any:
    """Return a trainer that says nothing; 21 texts make windows and batches that are uneven."""
    dtype = options.pop("dtype", torch.float64)
    own = {k: options.pop(k) for k in [*options] if k in _OF_TRAINER}
    quiet = {
        "output_dir": options.pop("output_dir", None) or tempfile.gettempdir(),
        "num_train_epochs": 1,
        "per_device_train_batch_size": 8,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "seed": 3,
        "optim": "adamw_torch",  # one operator per parameter, so that memory can run out between
    }
    given = {
        "model": MODELS[name](dtype),
        "train_dataset": texts(21, LABELS[name]),
        "data_collator": padded,
    }
    arguments = TrainingArguments(**{**quiet, **options})
    return kind(args=arguments, **{**given, **own})


_OF_TRAINER = (
    *("callbacks", "compute_loss_func", "compute_metrics", "data_collator", "eval_dataset"),
    *("model", "optimizers", "teacher", "train_dataset", "memfit"),
)


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between two models' weights."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def losses(found: Any) -> list[float]:
    """List the losses that a trainer has logged."""
    return [each["loss"] for each in found.state.log_history if "loss" in each]
