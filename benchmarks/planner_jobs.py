"""Small jobs for the planner's benchmark: one per kind of model that memory remedies differ on.

A plain step takes 20 to 150 ms on two cores and 30 to 200 MiB. Weights and batches are the same
each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from architectures import OPTIMIZERS
from planner_models import (
    AcrossPositions,
    Attention,
    Block,
    Encoder,
    Experts,
    LanguageModel,
    LstmClassifier,
    Residual,
    Sizes,
    Unet,
    WeighingAttention,
    gpt_block,
    mlp,
)
from torch import Tensor, nn
from torch.nn import functional as F

from memfit import Job, Total

_SEED = 7


def planner_jobs() -> Mapping[str, Callable[[], Job]]:
    """Return the builders of all jobs by name."""
    return {
        "gpt": gpt,
        "bert": bert,
        "attention-weights": attention_weights,
        "tied-language-model": tied_language_model,
        "resnet": batch_normalised_resnet,
        "group-norm-cnn": group_norm_cnn,
        "u-net": u_net,
        "lstm": lstm,
        "mixture-of-experts": mixture_of_experts,
        "mlp-mixer": mlp_mixer,
        "wide-mlp": wide_mlp,
        "ragged-tokens": ragged_tokens,
        "llama": llama,
    }


def gpt() -> Job:
    """Build a decoder with fused attention."""
    return _language_job("gpt", Sizes(256, 160, 3, 96), 8, gpt_block)


def attention_weights() -> Job:
    """Build an encoder whose attention makes weights that nobody uses."""
    sizes = Sizes(64, 112, 2, 192)

    def block(sizes: Sizes) -> nn.Module:
        return Block(sizes.width, WeighingAttention(sizes), mlp(sizes.width, 4 * sizes.width))

    return _language_job("attention-weights", sizes, 8, block)


def tied_language_model() -> Job:
    """Build a decoder whose logits are most of its memory; input and output share a matrix."""
    sizes = Sizes(4096, 64, 2, 64)
    return _language_job("tied-language-model", sizes, 16, gpt_block, is_tied=True)


def mixture_of_experts() -> Job:
    """Build a decoder with four experts per block."""

    def block(sizes: Sizes) -> nn.Module:
        return Block(sizes.width, Attention(sizes), Experts(sizes))

    return _language_job("mixture-of-experts", Sizes(128, 112, 2, 64), 16, block)


def ragged_tokens() -> Job:
    """Build a decoder over sentences of many lengths: the loss is a sum and a count."""
    sizes = Sizes(512, 160, 3, 80)

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(8, sizes.num_tokens + 1, (num_samples, 1))
        ids = torch.randint(0, sizes.num_classes, (num_samples, sizes.num_tokens + 1))
        return ids, torch.arange(sizes.num_tokens) < lengths

    def loss(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Total:
        ids, is_token = inputs
        each = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
        return Total((each * is_token).sum(), is_token.sum())

    job = _language_job("ragged-tokens", sizes, 10, gpt_block)
    return replace(job, batch=_seeded(batch), loss=loss)


def bert() -> Job:
    """Build an encoder that guesses the tokens of its input."""
    sizes = Sizes(256, 160, 3, 64)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        shown = ids.masked_fill(torch.arange(sizes.num_tokens) % 7 == 0, 0)
        return F.cross_entropy(model(shown).flatten(0, 1), ids.flatten())

    def batch(num_samples: int) -> Tensor:
        return torch.randint(0, sizes.num_classes, (num_samples, sizes.num_tokens))

    return seeded_job("bert", lambda: Encoder(sizes), batch, loss, batch_size=12)


def llama() -> Job:
    """Build a tiny Llama, whose config keeps a cache for generation unless told otherwise."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=448,
    )

    def batch(num_samples: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 512, (num_samples, 96))
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return model(**inputs).loss

    return seeded_job(
        "llama", lambda: transformers.LlamaForCausalLM(config), batch, loss, batch_size=8
    )


def batch_normalised_resnet() -> Job:
    """Build a residual network whose normalisation couples the samples of a batch."""
    return _residual_job("resnet", nn.BatchNorm2d, (2, 1))


def group_norm_cnn() -> Job:
    """Build a convolutional network that treats samples apart."""
    return _residual_job("group-norm-cnn", partial(nn.GroupNorm, 4), (3, 2))


def u_net() -> Job:
    """Build a segmentation network."""

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 1, 64, 64), torch.randint(0, 2, (num_samples, 64, 64))

    return seeded_job("u-net", Unet, batch, classes_loss, batch_size=8)


def lstm() -> Job:
    """Build a recurrent classifier."""

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 64, 48), torch.randint(0, 10, (num_samples,))

    return seeded_job("lstm", LstmClassifier, batch, classes_loss, batch_size=48)


def mlp_mixer() -> Job:
    """Build an image classifier of MLPs alone."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 128, 4, stride=4),
            nn.Flatten(2),
            nn.Linear(64, 128),  # the positions of each channel
            *(Block(128, AcrossPositions(128, 128), mlp(128, 512)) for _ in range(3)),
            nn.Flatten(),
            nn.Linear(128 * 128, 10),
        )

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 3, 32, 32), torch.randint(0, 10, (num_samples,))

    return seeded_job("mlp-mixer", model, batch, classes_loss, batch_size=12)


def wide_mlp() -> Job:
    """Build a regression whose weights, gradients and Adam states are nearly all there is."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(256, 1280),
            nn.ReLU(),
            nn.Linear(1280, 1280),
            nn.ReLU(),
            nn.Linear(1280, 1280),
            nn.ReLU(),
            nn.Linear(1280, 16),
        )

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 256), torch.randn(num_samples, 16)

    def loss(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(inputs[0]), inputs[1])

    job = seeded_job("wide-mlp", model, batch, loss, batch_size=128)
    return replace(job, optimizer=_adam)


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _residual_job(name: str, norm: Callable[[int], nn.Module], num_blocks: tuple[int, int]) -> Job:
    """Describe a classifier of residual blocks at two resolutions."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            *(Residual(32, norm) for _ in range(num_blocks[0])),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            *(Residual(64, norm) for _ in range(num_blocks[1])),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 3, 32, 32), torch.randint(0, 10, (num_samples,))

    return seeded_job(name, model, batch, classes_loss, batch_size=20, optimizer="SGD")


def classes_loss(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    """Compare scores with classes."""
    return F.cross_entropy(model(inputs[0]), inputs[1])


def _language_job(
    name: str,
    sizes: Sizes,
    batch_size: int,
    block: Callable[[Sizes], nn.Module],
    *,
    is_tied: bool = False,
) -> Job:
    """Describe a job that guesses the next token."""

    def batch(num_samples: int) -> Tensor:
        return torch.randint(0, sizes.num_classes, (num_samples, sizes.num_tokens + 1))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def model() -> nn.Module:
        return LanguageModel(sizes, block, is_tied=is_tied)

    return seeded_job(name, model, batch, loss, batch_size=batch_size)


def seeded_job(
    name: str,
    model: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    loss: Callable[[nn.Module, Any], Tensor | Total],
    *,
    batch_size: int,
    optimizer: str = "AdamW",
) -> Job:
    """Describe a job whose model and batch are built from the same random draws each time."""
    return Job(
        name=name,
        model=_seeded(model),
        batch=_seeded(batch),
        loss=loss,
        optimizer=OPTIMIZERS[optimizer],
        batch_size=batch_size,
    )


def _seeded(build: Callable[..., Any]) -> Callable[..., Any]:
    """Have something built from the same random draws each time."""

    def built(*arguments: Any) -> Any:
        torch.manual_seed(_SEED)
        return build(*arguments)

    return built
