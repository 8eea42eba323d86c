"""The decoder of torchtitan, at the commits that published rows name.

Source: torchtitan/models/llama/model.py (torchtrain/models/llama/model.py before May 2024):
rotary embeddings as complex numbers in float32, heads of keys and values repeated, SwiGLU, and
until pull request 985 (March 2025) an RMSNorm of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

_BASE = 500_000.0
_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a decoder is built from."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    hidden_width: int
    vocabulary: int
    length: int
    is_own_norm: bool = True
    """Whether the norm is the project's own module, in several operators."""
    upcasts_logits: bool = False
    """Whether the model returns its logits in float32."""


class OwnNorm(nn.Module):
    """Normalise by the root mean square, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is normalised and scaled."""
        return self._normed(x.float()).type_as(x) * self.weight

    @staticmethod
    def _normed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPSILON)


def rotated(queries: torch.Tensor, keys: torch.Tensor, turns: torch.Tensor) -> list[torch.Tensor]:
    """Turn queries and keys by their positions, as complex numbers."""
    turns = turns[: queries.shape[1]].view(1, queries.shape[1], 1, -1)
    found = []
    for each in (queries, keys):
        pairs = torch.view_as_complex(each.float().reshape(*each.shape[:-1], -1, 2))
        found.append(pairs)
    return [
        torch.view_as_real(pairs * turns).flatten(3).type_as(each)
        for pairs, each in zip(found, (queries, keys), strict=True)
    ]


class Attention(nn.Module):
    """Attend causally, with fewer heads of keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.width // shape.num_heads
        self.num_repeats = shape.num_heads // shape.num_kv_heads
        kv_width = shape.num_kv_heads * self.head_width
        self.wq = nn.Linear(shape.width, shape.width, bias=False)
        self.wk = nn.Linear(shape.width, kv_width, bias=False)
        self.wv = nn.Linear(shape.width, kv_width, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Return what is attended to."""
        batch, length, _ = x.shape
        queries, keys, values = (
            layer(x).view(batch, length, -1, self.head_width)
            for layer in (self.wq, self.wk, self.wv)
        )
        queries, keys = rotated(queries, keys, turns)
        keys, values = self._repeated(keys), self._repeated(values)
        out = F.scaled_dot_product_attention(
            queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), is_causal=True
        )
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        if self.num_repeats == 1:
            return x
        batch, length, heads, width = x.shape
        wide = x[:, :, :, None, :].expand(batch, length, heads, self.num_repeats, width)
        return wide.reshape(batch, length, heads * self.num_repeats, width)


class FeedForward(nn.Module):
    """A gated layer and its way back."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden_width, bias=False)
        self.w2 = nn.Linear(shape.hidden_width, shape.width, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden_width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gated layer's output."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        make = norm_of(shape)
        self.attention_norm, self.ffn_norm = make(), make()

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    """The whole model; ``turns`` are the rotations of all positions, complex64."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        head_width = shape.width // shape.num_heads
        exponents = torch.arange(0, head_width, 2).float() / head_width
        angles = torch.outer(torch.arange(shape.length).float(), _BASE**-exponents)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.layers = nn.ModuleDict({str(n): Block(shape) for n in range(shape.num_layers)})
        self.norm = norm_of(shape)()
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.upcasts_logits = shape.upcasts_logits

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits (batch, length, vocabulary)."""
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.turns)
        h = self.norm(h)
        out: torch.Tensor = self.output(h)
        return out.float() if self.upcasts_logits else out


def norm_of(shape: Shape) -> Callable[[], nn.Module]:
    """Return what makes a norm."""
    if shape.is_own_norm:
        return lambda: OwnNorm(shape.width)
    return lambda: nn.RMSNorm(shape.width, eps=_EPSILON)
