"""What is trained: a model by its constructor, the tensors of its batch, and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

BATCH = "batch"
"""Stands for the batch size in a shape."""
REAL = "real"
"""Stands for the dtype of the parameters: float32, or bfloat16 in pure bf16."""
_CLASSES = "cross_entropy(model(x), target)"
_TOKENS = "cross_entropy(model(x).flatten(0, 1), target.flatten())"
_NOTHING: Mapping[str, Any] = MappingProxyType({})

Shape = tuple[int | str, ...]
Tensor = tuple[str, Shape, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One model with its batch and loss."""

    library: str
    """``custom``, ``torchvision``, ``timm`` or ``transformers``."""
    call: str
    """How the model is made; architectures of torch alone are named in ``recording.models``."""
    inputs: tuple[Tensor, ...]
    """Name, shape and dtype of each tensor."""
    loss: str = _CLASSES
    cls: str | None = None
    turns: tuple[str, ...] = ()
    """Parts of the model that are trained in turn, each with an optimizer of its own."""
    recomputes: bool = False
    """Whether the model offers gradient checkpointing."""
    config: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)


def _own(name: str, *inputs: Tensor, **changes: Any) -> Workload:
    """Describe an architecture of this folder; sizes are written behind its name."""
    model, _, sizes = name.partition(" ")
    quoted = f"'{model}'" + (f", {sizes}" if sizes else "")
    return Workload(
        library="custom", call=f"recording.models.build({quoted})", inputs=inputs, **changes
    )


def _images(size: int, library: str, call: str, **changes: Any) -> Workload:
    inputs = (("x", (BATCH, 3, size, size), REAL), ("target", (BATCH,), "int64"))
    return Workload(library=library, call=call, inputs=inputs, **changes)


def _image(pixels: int) -> Tensor:
    return ("x", (BATCH, 3, pixels, pixels), REAL)


def _hub(cls: str, config: str, *inputs: Tensor, **changes: Any) -> Workload:
    """Describe a transformers model, built from its configuration."""
    return Workload(
        library="transformers",
        call=f"{cls}({config})",
        cls=cls,
        inputs=inputs,
        loss="model(**batch).loss",
        recomputes=True,
        **changes,
    )


def _tokens(name: str, length: int) -> Tensor:
    return (name, (BATCH, length), "int64")


def _text(length: int) -> tuple[Tensor, Tensor]:
    return _tokens("input_ids", length), _tokens("labels", length)


_TARGET: Tensor = ("target", (BATCH,), "int64")
_LANGUAGE: dict[str, Any] = {"loss": _TOKENS, "recomputes": True}
_LLAMA_1B = (
    "LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, "
    "num_attention_heads=32, num_key_value_heads=8, vocab_size=32000, head_dim=64)"
)
_QWEN = (
    "Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=12, "
    "num_attention_heads=14, num_key_value_heads=2, vocab_size=64000, tie_word_embeddings=True)"
)

WORKLOADS: Mapping[str, Workload] = {
    "mlp": _own("mlp", ("x", (BATCH, 1024), REAL), _TARGET, recomputes=True),
    "cnn": _own("cnn", _image(64), _TARGET),
    "resnet": _own("resnet", _image(224), _TARGET, recomputes=True),
    "mobilenet": _own("mobilenet", _image(224), _TARGET),
    "convnext": _own("convnext", _image(224), _TARGET, recomputes=True),
    "unet": _own(
        "unet",
        _image(128),
        ("target", (BATCH, 3, 128, 128), REAL),
        loss="mse_loss(model(x), target)",
        recomputes=True,
    ),
    "video": _own("video", ("x", (BATCH, 3, 16, 64, 64), REAL), _TARGET),
    "audio": _own("audio", ("x", (BATCH, 1, 16000), REAL), _TARGET, recomputes=True),
    "mixer": _own("mixer", _image(224), _TARGET, recomputes=True),
    "vae": _own("autoencoder", _image(64), loss="model(x).mean()"),
    "gan": _own(
        "adversaries",
        _image(64),
        loss="model(x).mean()",
        turns=("discriminator", "generator"),
    ),
    "lstm": _own("recurrent kind='LSTM'", _tokens("x", 128), _tokens("target", 128), loss=_TOKENS),
    "gru": _own("recurrent kind='GRU'", _tokens("x", 128), _tokens("target", 128), loss=_TOKENS),
    "bigru": _own("feature_recurrent", ("x", (BATCH, 400, 80), REAL), _TARGET),
    "encoder": _own("encoder", _tokens("x", 256), _TARGET),
    "attention": _own(
        "attention",
        ("x", (BATCH, 512, 512), REAL),
        ("target", (BATCH, 512, 512), REAL),
        loss="mse_loss(model(x), target)",
        recomputes=True,
    ),
    "decoder": _own("decoder", _tokens("x", 512), _tokens("target", 512), **_LANGUAGE),
    "decoder-long": _own(
        "decoder width=1024, depth=8, modern=True",
        _tokens("x", 4096),
        _tokens("target", 4096),
        **_LANGUAGE,
    ),
    "decoder-gqa": _own(
        "decoder width=1024, depth=16, modern=True",
        _tokens("x", 1024),
        _tokens("target", 1024),
        **_LANGUAGE,
    ),
    "translator": _own(
        "translator",
        _tokens("x", 128),
        _tokens("y", 96),
        _tokens("target", 96),
        loss="cross_entropy(model(x, y).flatten(0, 1), target.flatten())",
    ),
    "recommender": _own("recommender", ("x", (BATCH, 4, 32), "int64"), _TARGET),
    "towers": _own(
        "towers",
        ("x", (BATCH, 1024), REAL),
        ("y", (BATCH, 1024), REAL),
        loss="model(x, y).mean()",
    ),
    "graph": _own("graph", ("x", (2, BATCH), "int64"), ("target", (50_000,), "int64")),
    "tagger": _own("tagger", _tokens("x", 200), _TARGET),
    "gpt2": _hub("GPT2LMHeadModel", "GPT2Config()", *_text(512)),
    "bert": _hub("BertForMaskedLM", "BertConfig()", *_text(256)),
    "distilbert": _hub("DistilBertForMaskedLM", "DistilBertConfig()", *_text(256)),
    "roberta": _hub("RobertaForMaskedLM", "RobertaConfig()", *_text(256)),
    "t5-small": _hub(
        "T5ForConditionalGeneration",
        "T5Config(decoder_start_token_id=0, pad_token_id=0)",
        _tokens("input_ids", 256),
        _tokens("labels", 128),
    ),
    "llama-1b": _hub("LlamaForCausalLM", _LLAMA_1B, *_text(1024)),
    "qwen2": _hub("Qwen2ForCausalLM", _QWEN, *_text(1024)),
    "vit": _hub(
        "ViTForImageClassification",
        "ViTConfig()",
        ("pixel_values", (BATCH, 3, 224, 224), REAL),
        ("labels", (BATCH,), "int64"),
    ),
    "whisper-tiny": _hub(
        "WhisperForConditionalGeneration",
        "WhisperConfig()",
        ("input_features", (BATCH, 80, 3000), REAL),
        _tokens("labels", 64),
    ),
    "resnet50": _images(224, "torchvision", "resnet50()"),
    "vgg16": _images(224, "torchvision", "vgg16()"),
    "efficientnet_b0": _images(224, "torchvision", "efficientnet_b0()"),
    "swin_t": _images(224, "torchvision", "swin_t()"),
    "vit_small": _images(224, "timm", "create_model('vit_small_patch16_224')", recomputes=True),
    "convnext_tiny": _images(224, "timm", "create_model('convnext_tiny')", recomputes=True),
}
