"""Small jobs for the planner's benchmark: one per kind of model that memory remedies differ on.

A plain step takes 20 to 150 ms on two cores and 30 to 200 MiB. Weights and batches are the same
each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from architectures import OPTIMIZERS, resnet
from torch import Tensor, nn
from torch.nn import functional as F

from memfit import Job, Total

_SEED = 7


def planner_jobs() -> Mapping[str, Callable[[], Job]]:
    """Give the builders of all jobs by name."""
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


@dataclass(frozen=True)
class _Sizes:
    """How large a model of tokens is."""

    num_classes: int
    width: int
    num_layers: int
    num_tokens: int
    num_heads: int = 4


class _Attention(nn.Module):
    """Causal self-attention by torch's fused function."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.mix = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each token look at the ones before it."""
        parts = self.mix(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class _WeighingAttention(nn.Module):
    """Self-attention that computes its weights as a matrix and throws them away."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(sizes.width, sizes.num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Let all tokens look at all."""
        mixed, _ = self.layer(x, x, x)
        result: Tensor = mixed
        return result


class _Experts(nn.Module):
    """Four MLPs, of which each token's own is picked by a dense mask."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.width, 4)
        self.experts = nn.ModuleList(_mlp(sizes.width, 2 * sizes.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Weigh each token's first choice by its probability."""
        share = self.router(x).softmax(-1)
        chosen = F.one_hot(share.argmax(-1), len(self.experts)).to(share.dtype) * share
        outputs = (expert(x) * chosen[..., i, None] for i, expert in enumerate(self.experts))
        return torch.stack(list(outputs)).sum(0)


class _Block(nn.Module):
    """A pre-norm block: something that mixes tokens, then something that treats each."""

    def __init__(self, width: int, mixing: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixing, self.own = mixing, own

    def forward(self, x: Tensor) -> Tensor:
        """Add both to the stream."""
        x = x + self.mixing(self.first_norm(x))
        result: Tensor = x + self.own(self.second_norm(x))
        return result


class _LanguageModel(nn.Module):
    """Token and position embeddings, blocks, and a score for every token of the vocabulary."""

    def __init__(
        self, sizes: _Sizes, block: Callable[[_Sizes], nn.Module], *, is_tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.num_classes, sizes.width)
        self.positions = nn.Parameter(0.02 * torch.randn(sizes.num_tokens, sizes.width))
        self.blocks = nn.ModuleList(block(sizes) for _ in range(sizes.num_layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.num_classes, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Give scores (B, T, classes) for ids (B, T)."""
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def gpt() -> Job:
    """Build a decoder with fused attention."""
    return _language_job("gpt", _Sizes(256, 128, 6, 128), 8, _gpt_block)


def attention_weights() -> Job:
    """Build an encoder whose attention makes weights that nobody uses."""
    sizes = _Sizes(64, 96, 3, 192)

    def block(sizes: _Sizes) -> nn.Module:
        return _Block(sizes.width, _WeighingAttention(sizes), _mlp(sizes.width, 4 * sizes.width))

    return _language_job("attention-weights", sizes, 8, block)


def tied_language_model() -> Job:
    """Build a decoder whose logits are most of its memory; input and output share a matrix."""
    sizes = _Sizes(4096, 64, 2, 64)
    return _language_job("tied-language-model", sizes, 32, _gpt_block, is_tied=True)


def mixture_of_experts() -> Job:
    """Build a decoder with four experts per block."""

    def block(sizes: _Sizes) -> nn.Module:
        return _Block(sizes.width, _Attention(sizes), _Experts(sizes))

    return _language_job("mixture-of-experts", _Sizes(128, 96, 4, 64), 12, block)


def ragged_tokens() -> Job:
    """Build a decoder over sentences of many lengths: the loss is a sum and a count."""
    sizes = _Sizes(512, 128, 4, 96)

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(8, sizes.num_tokens + 1, (num_samples, 1))
        ids = torch.randint(0, sizes.num_classes, (num_samples, sizes.num_tokens + 1))
        return ids, torch.arange(sizes.num_tokens) < lengths

    def loss(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Total:
        ids, is_token = inputs
        each = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
        return Total((each * is_token).sum(), is_token.sum())

    job = _language_job("ragged-tokens", sizes, 12, _gpt_block)
    return replace(job, batch=_seeded(batch), loss=loss)


class _Encoder(nn.Module):
    """torch's own encoder layers with dropout."""

    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.num_classes, sizes.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                sizes.width, sizes.num_heads, 4 * sizes.width, activation="gelu", batch_first=True
            )
            for _ in range(sizes.num_layers)
        )
        self.head = nn.Linear(sizes.width, sizes.num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Give scores (B, T, classes) for ids (B, T)."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


def bert() -> Job:
    """Build an encoder that guesses the tokens of its input."""
    sizes = _Sizes(256, 128, 4, 64)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        shown = ids.masked_fill(torch.arange(sizes.num_tokens) % 7 == 0, 0)
        return F.cross_entropy(model(shown).flatten(0, 1), ids.flatten())

    def batch(num_samples: int) -> Tensor:
        return torch.randint(0, sizes.num_classes, (num_samples, sizes.num_tokens))

    return _job("bert", lambda: _Encoder(sizes), batch, loss, batch_size=16)


def llama() -> Job:
    """Build a tiny Llama, whose config keeps a cache for generation unless told otherwise."""
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=352,
    )

    def batch(num_samples: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 512, (num_samples, 96))
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        value: Tensor = model(**inputs).loss
        return value

    return _job("llama", lambda: transformers.LlamaForCausalLM(config), batch, loss, batch_size=8)


def batch_normalised_resnet() -> Job:
    """Build a residual network whose normalisation couples the samples of a batch."""
    job = resnet(OPTIMIZERS["SGD"])
    return replace(job, name="resnet", model=_seeded(job.model), batch=_seeded(job.batch))


class _Residual(nn.Module):
    """Two convolutions beside the stream."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, num_channels),
            nn.ReLU(),
            nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, num_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add to the stream."""
        return F.relu(x + self.inner(x))


def group_norm_cnn() -> Job:
    """Build a convolutional network that treats samples apart."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            *(_Residual(32) for _ in range(3)),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            *(_Residual(64) for _ in range(2)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 3, 32, 32), torch.randint(0, 10, (num_samples,))

    return _job("group-norm-cnn", model, batch, _classes_loss, batch_size=16, optimizer="SGD")


class _Unet(nn.Module):
    """Down twice and up twice, with skips across."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.down = nn.ModuleList(_convolutions(width, width) for width in (16, 32))
        self.shrink = nn.ModuleList(
            nn.Conv2d(width, 2 * width, 2, stride=2) for width in (16, 32)
        )
        self.bottom = _convolutions(64, 64)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in (32, 16)
        )
        self.up = nn.ModuleList(_convolutions(2 * width, width) for width in (32, 16))
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Give scores (B, 2, H, W) for images (B, 1, H, W)."""
        x = self.stem(x)
        skips = []
        for down, shrink in zip(self.down, self.shrink, strict=True):
            x = down(x)
            skips.append(x)
            x = shrink(x)
        x = self.bottom(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), skips.pop()], dim=1))
        scores: Tensor = self.head(x)
        return scores


def u_net() -> Job:
    """Build a segmentation network."""

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 1, 64, 64), torch.randint(0, 2, (num_samples, 64, 64))

    return _job("u-net", _Unet, batch, _classes_loss, batch_size=8)


class _LstmClassifier(nn.Module):
    """Two LSTM layers, of which the last state decides."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(48, 128, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Give scores (B, 10) for series (B, T, 48)."""
        states, _ = self.lstm(x)
        scores: Tensor = self.head(states[:, -1])
        return scores


def lstm() -> Job:
    """Build a recurrent classifier."""

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 64, 48), torch.randint(0, 10, (num_samples,))

    return _job("lstm", _LstmClassifier, batch, _classes_loss, batch_size=48)


class _AcrossPositions(nn.Module):
    """An MLP along the second dimension."""

    def __init__(self, num_positions: int, hidden: int) -> None:
        super().__init__()
        self.mlp = _mlp(num_positions, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of each channel."""
        mixed: Tensor = self.mlp(x.mT)
        return mixed.mT


def mlp_mixer() -> Job:
    """Build an image classifier of MLPs alone."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 128, 4, stride=4),
            nn.Flatten(2),
            nn.Linear(64, 128),  # the positions of each channel
            *(_Block(128, _AcrossPositions(128, 128), _mlp(128, 384)) for _ in range(4)),
            nn.Flatten(),
            nn.Linear(128 * 128, 10),
        )

    def batch(num_samples: int) -> tuple[Tensor, Tensor]:
        return torch.randn(num_samples, 3, 32, 32), torch.randint(0, 10, (num_samples,))

    return _job("mlp-mixer", model, batch, _classes_loss, batch_size=12)


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

    job = _job("wide-mlp", model, batch, loss, batch_size=128)
    return replace(job, optimizer=_adam)


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def _gpt_block(sizes: _Sizes) -> nn.Module:
    return _Block(sizes.width, _Attention(sizes), _mlp(sizes.width, 4 * sizes.width))


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def _convolutions(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, padding=1),
        nn.GroupNorm(4, num_outputs),
        nn.SiLU(),
        nn.Conv2d(num_outputs, num_outputs, 3, padding=1),
        nn.GroupNorm(4, num_outputs),
        nn.SiLU(),
    )


def _classes_loss(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(inputs[0]), inputs[1])


def _language_job(
    name: str,
    sizes: _Sizes,
    batch_size: int,
    block: Callable[[_Sizes], nn.Module],
    *,
    is_tied: bool = False,
) -> Job:
    """Describe a job that guesses the next token."""

    def batch(num_samples: int) -> Tensor:
        return torch.randint(0, sizes.num_classes, (num_samples, sizes.num_tokens + 1))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def model() -> nn.Module:
        return _LanguageModel(sizes, block, is_tied=is_tied)

    return _job(name, model, batch, loss, batch_size=batch_size)


def _job(
    name: str,
    model: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    loss: Callable[[nn.Module, Any], Tensor | Total],
    *,
    batch_size: int,
    optimizer: str = "AdamW",
) -> Job:
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
