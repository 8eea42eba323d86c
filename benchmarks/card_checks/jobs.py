"""The jobs that are checked on a card: one per kind of model that memory remedies differ on.

None has dropout, so that a plan that keeps the results gives the same parameters up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from planner_models import Block, LanguageModel, Residual, Sizes, WeighingAttention, gpt_block
from planner_models import mlp as feed_forward
from torch import Tensor, nn
from torch.nn import functional as F

from memfit import Job

_SEED = 11
SIZES = ("card", "tiny")
"""``card`` fills some GiB of a data-centre card; ``tiny`` is for trying everything on the CPU."""


def card_jobs(size: str) -> Mapping[str, Callable[[], Job]]:
    """Return the builders of all jobs by name, in a size of ``SIZES``."""
    is_tiny = size == "tiny"
    return {
        "mlp": lambda: mlp(64, 2) if is_tiny else mlp(4096, 6),
        "cnn": lambda: cnn(8, 16, 8) if is_tiny else cnn(64, 64, 256),
        "gpt2": lambda: gpt2(64, 2, 128, 32, 4) if is_tiny else gpt2(768, 6, 50257, 512, 16),
        "llama-lora": lambda: (
            llama_lora(64, 2, 128, 32, 4) if is_tiny else llama_lora(1024, 6, 32000, 512, 8)
        ),
        "vocabulary": lambda: (
            vocabulary(Sizes(512, 32, 2, 32), 4)
            if is_tiny
            else vocabulary(Sizes(100_000, 512, 2, 256), 16)
        ),
        "weighing-attention": lambda: (
            weighing_attention(Sizes(64, 32, 2, 64), 4)
            if is_tiny
            else weighing_attention(Sizes(4096, 512, 4, 1024, num_heads=8), 8)
        ),
    }


def mlp(width: int, depth: int) -> Job:
    """Build a regression by wide layers."""

    def model() -> nn.Module:
        layers = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers, nn.Linear(width, 16))

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, width), torch.randn(num_samples, 16)

    def loss(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(inputs[0]), inputs[1])

    return _job("mlp", model, batch, loss, 4 * width)


def cnn(num_channels: int, num_pixels: int, batch_size: int) -> Job:
    """Build a classifier of images whose normalisation couples the samples of a batch."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, num_channels, 3, padding=1),
            *(Residual(num_channels, nn.BatchNorm2d) for _ in range(3)),
            nn.Conv2d(num_channels, 2 * num_channels, 3, stride=2, padding=1),
            *(Residual(2 * num_channels, nn.BatchNorm2d) for _ in range(2)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * num_channels, 10),
        )

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(num_samples, 3, num_pixels, num_pixels)
        return images, torch.randint(0, 10, (num_samples,))

    def loss(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(inputs[0]), inputs[1])

    return _job("cnn", model, batch, loss, batch_size, optimizer="SGD")


def gpt2(width: int, depth: int, num_classes: int, num_tokens: int, batch_size: int) -> Job:
    """Build a GPT-2 from its configuration."""
    transformers: Any = import_module("transformers")  # takes seconds to load

    config = transformers.GPT2Config(
        vocab_size=num_classes,
        n_embd=width,
        n_layer=depth,
        n_head=max(1, width // 64),
        n_positions=num_tokens,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    return _text_job(
        "gpt2", lambda: transformers.GPT2LMHeadModel(config), num_classes, num_tokens, batch_size
    )


def llama_lora(width: int, depth: int, num_classes: int, num_tokens: int, batch_size: int) -> Job:
    """Build a Llama whose frozen weights are adapted by LoRA."""
    peft, transformers = import_module("peft"), import_module("transformers")

    config = transformers.LlamaConfig(
        vocab_size=num_classes,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=depth,
        num_attention_heads=max(2, width // 64),
        num_key_value_heads=max(1, width // 128),
        use_cache=False,
    )
    lora = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"]
    )

    def model() -> nn.Module:
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)

    return _text_job("llama-lora", model, num_classes, num_tokens, batch_size)


def vocabulary(sizes: Sizes, batch_size: int) -> Job:
    """Build a decoder whose logits are most of its memory."""
    return _token_job("vocabulary", sizes, gpt_block, batch_size)


def weighing_attention(sizes: Sizes, batch_size: int) -> Job:
    """Build an encoder whose attention makes weights that nobody uses."""

    def block(sizes: Sizes) -> nn.Module:
        return Block(sizes.width, WeighingAttention(sizes), feed_forward(sizes.width, sizes.width))

    return _token_job("weighing-attention", sizes, block, batch_size)


def _token_job(name: str, sizes: Sizes, block: Callable[[Sizes], nn.Module], size: int) -> Job:
    """Describe a job that guesses the next token, by a loss of its own."""

    def batch(num_samples: int) -> Tensor:
        return torch.randint(0, sizes.num_classes, (num_samples, sizes.num_tokens + 1))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return _job(name, lambda: LanguageModel(sizes, block), batch, loss, size)


def _text_job(
    name: str, model: Callable[[], nn.Module], num_classes: int, num_tokens: int, size: int
) -> Job:
    """Describe a job over a transformers model, which computes its own loss."""

    def batch(num_samples: int) -> dict[str, Tensor]:
        ids = torch.randint(0, num_classes, (num_samples, num_tokens))
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return model(**inputs).loss

    return _job(name, model, batch, loss, size)


def _job(
    name: str,
    model: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    batch_size: int,
    *,
    optimizer: str = "AdamW",
) -> Job:
    return Job(
        name=name,
        model=_seeded(model),
        batch=_seeded(batch),
        loss=loss,
        optimizer=_momentum if optimizer == "SGD" else _adamw,
        batch_size=batch_size,
    )


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def _seeded(build: Callable[..., Any]) -> Callable[..., Any]:
    """Have something built from the same random draws each time."""

    def built(*arguments: Any) -> Any:
        torch.manual_seed(_SEED)
        return build(*arguments)

    return built


def _tiny(name: str) -> Job:
    return card_jobs("tiny")[name]()


def tiny_mlp() -> Job:
    """Build the smallest one, for the command line."""
    return _tiny("mlp")


def card_mlp() -> Job:
    """Build one that fills some GiB, for the command line."""
    return card_jobs("card")["mlp"]()
