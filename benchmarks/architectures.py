"""Jobs over well-known architectures, built from configs with random weights.

Each has a few million parameters at most, so that a step takes a fraction of a second on two cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from memfit import Job

OptimizerBuilder = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: Mapping[str, OptimizerBuilder] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}
_VOCABULARY = 1000
_BATCH_SIZE = 8

Batch = Callable[[int], dict[str, torch.Tensor]]


def architectures() -> Mapping[str, Callable[[OptimizerBuilder], Job]]:
    """Return the builders of all jobs, by the name of their architecture."""
    return {**{name: partial(_job, *of_hub) for name, of_hub in _HUB.items()}, "LSTM": lstm}


def _job(name: str, sizes: Mapping[str, Any], batch: Batch, optimizer: OptimizerBuilder) -> Job:
    """Describe a job over a transformers model that computes its own loss."""
    kind: Any = getattr(transformers, name)
    config = kind.config_class(**sizes)

    def loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**inputs).loss

    return Job(
        model=lambda: kind(config),
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        batch_size=_BATCH_SIZE,
    )


class _Lstm(nn.Module):
    """A language model with two LSTM layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, 64)
        self.lstm = nn.LSTM(64, 128, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, _VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, vocabulary) for ids (B, T)."""
        states, _ = self.lstm(self.embedding(ids))
        return self.head(states)


def lstm(optimizer: OptimizerBuilder) -> Job:
    """Build a recurrent language model."""

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits = model(ids[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Job(
        model=_Lstm,
        batch=lambda num_samples: _ids(num_samples, 33),
        loss=loss,
        optimizer=optimizer,
        batch_size=_BATCH_SIZE,
        name="lstm",
    )


def _tokens(num_samples: int) -> dict[str, torch.Tensor]:
    ids = _ids(num_samples, 64)
    return {"input_ids": ids, "labels": ids.clone()}


def _images(num_samples: int) -> dict[str, Any]:
    labels = torch.randint(0, 10, (num_samples,))
    return {"pixel_values": torch.randn(num_samples, 3, 64, 64), "labels": labels}


def _ids(num_rows: int, num_columns: int) -> torch.Tensor:
    return torch.randint(0, _VOCABULARY, (num_rows, num_columns))


def _texts(num_samples: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(num_samples, 64), "labels": _ids(num_samples, 32)}


def _sounds(num_samples: int) -> dict[str, torch.Tensor]:
    features = torch.randn(num_samples, 16, 128)
    return {"input_features": features, "labels": _ids(num_samples, 24)}


_WIDE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
_HUB: Mapping[str, tuple[str, Mapping[str, Any], Batch]] = {
    "BERT": (
        "BertForMaskedLM",
        {"vocab_size": _VOCABULARY, **_WIDE, "intermediate_size": 512},
        _tokens,
    ),
    "GPT-2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": _VOCABULARY,
            "n_embd": 128,
            "n_layer": 4,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "loss_type": "ForCausalLM",
        },
        _tokens,
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": _VOCABULARY,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 512,
            "num_layers": 3,
            "num_heads": 4,
            "use_cache": False,
            "decoder_start_token_id": 0,
        },
        _texts,
    ),
    "ViT": (
        "ViTForImageClassification",
        {**_WIDE, "intermediate_size": 512, "image_size": 64, "patch_size": 8, "num_labels": 10},
        _images,
    ),
    "ResNet": (
        "ResNetForImageClassification",
        {
            "embedding_size": 32,
            "hidden_sizes": [64, 128, 256, 512],
            "depths": [2, 2, 2, 2],
            "num_labels": 10,
        },
        _images,
    ),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [32, 64, 128, 256], "depths": [2, 2, 3, 2], "num_labels": 10},
        _images,
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        {
            "vocab_size": _VOCABULARY,
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "d_model": 128,
            "max_source_positions": 64,
            "max_target_positions": 64,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        _sounds,
    ),
    "Llama": (
        "LlamaForCausalLM",
        {
            "vocab_size": _VOCABULARY,
            **_WIDE,
            "num_key_value_heads": 2,
            "intermediate_size": 352,
            "use_cache": False,
        },
        _tokens,
    ),
}
"""Of each, the class of transformers, the sizes that its configuration has, and its batch."""
