"""The models of the planner's benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """How large a model of tokens is."""

    num_classes: int
    width: int
    num_layers: int
    num_tokens: int
    num_heads: int = 4


class Attention(nn.Module):
    """Causal self-attention by torch's fused function."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.mix = nn.Linear(sizes.width, 3 * sizes.width)
        self.out = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Let each token look at the ones before it."""
        parts = self.mix(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class WeighingAttention(nn.Module):
    """Self-attention that computes its weights as a matrix and throws them away."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(sizes.width, sizes.num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Let all tokens look at all."""
        mixed, _ = self.layer(x, x, x)
        return mixed


class Experts(nn.Module):
    """Four MLPs, of which each token's own is picked by a dense mask."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.width, 4)
        self.experts = nn.ModuleList(mlp(sizes.width, 2 * sizes.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Weigh each token's first choice by its probability."""
        share = self.router(x).softmax(-1)
        chosen = F.one_hot(share.argmax(-1), len(self.experts)).to(share.dtype) * share
        outputs = (expert(x) * chosen[..., i, None] for i, expert in enumerate(self.experts))
        return torch.stack(list(outputs)).sum(0)


class Block(nn.Module):
    """A pre-norm block: something that mixes tokens, then something that treats each."""

    def __init__(self, width: int, mixing: nn.Module, own: nn.Module) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixing, self.own = mixing, own

    def forward(self, x: Tensor) -> Tensor:
        """Add both to the stream."""
        x = x + self.mixing(self.first_norm(x))
        return x + self.own(self.second_norm(x))


class LanguageModel(nn.Module):
    """Token and position embeddings, blocks, and a score for every token of the vocabulary."""

    def __init__(
        self, sizes: Sizes, block: Callable[[Sizes], nn.Module], *, is_tied: bool = False
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
        """Return scores (B, T, classes) for ids (B, T)."""
        x = self.embedding(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """torch's own encoder layers with dropout."""

    def __init__(self, sizes: Sizes) -> None:
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
        """Return scores (B, T, classes) for ids (B, T)."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Residual(nn.Module):
    """Two convolutions beside the stream."""

    def __init__(self, num_channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False),
            norm(num_channels),
            nn.ReLU(),
            nn.Conv2d(num_channels, num_channels, 3, padding=1, bias=False),
            norm(num_channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add to the stream."""
        return F.relu(x + self.inner(x))


class Unet(nn.Module):
    """Down twice and up twice, with skips across."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.down = nn.ModuleList(convolutions(width, width) for width in (16, 32))
        self.shrink = nn.ModuleList(nn.Conv2d(width, 2 * width, 2, stride=2) for width in (16, 32))
        self.bottom = convolutions(64, 64)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in (32, 16)
        )
        self.up = nn.ModuleList(convolutions(2 * width, width) for width in (32, 16))
        self.head = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, 2, H, W) for images (B, 1, H, W)."""
        x = self.stem(x)
        skips = []
        for down, shrink in zip(self.down, self.shrink, strict=True):
            x = down(x)
            skips.append(x)
            x = shrink(x)
        x = self.bottom(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([grow(x), skips.pop()], dim=1))
        return self.head(x)


class LstmClassifier(nn.Module):
    """Two LSTM layers, of which the last state decides."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(48, 128, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, 10) for series (B, T, 48)."""
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


class AcrossPositions(nn.Module):
    """An MLP along the second dimension."""

    def __init__(self, num_positions: int, hidden: int) -> None:
        super().__init__()
        self.mlp = mlp(num_positions, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of each channel."""
        mixed: Tensor = self.mlp(x.mT)
        return mixed.mT


def gpt_block(sizes: Sizes) -> nn.Module:
    """Build a pre-norm block with fused attention."""
    return Block(sizes.width, Attention(sizes), mlp(sizes.width, 4 * sizes.width))


def mlp(width: int, hidden: int) -> nn.Sequential:
    """Build a layer up, and one down again."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def convolutions(num_inputs: int, num_outputs: int) -> nn.Sequential:
    """Build two convolutions, each normalised."""
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 3, padding=1),
        nn.GroupNorm(4, num_outputs),
        nn.SiLU(),
        nn.Conv2d(num_outputs, num_outputs, 3, padding=1),
        nn.GroupNorm(4, num_outputs),
        nn.SiLU(),
    )
