"""lit-gpt's decoder and its own LoRA layers, as they were in October 2023.

Source: lit_gpt/model.py, lit_gpt/lora.py and lit_gpt/rmsnorm.py at the commit that the rows name.
Adapters lie beside a linear layer; those of the fused query, key and value are convolved in groups
and, unless all three have one, copied into a tensor of zeros as wide as the layer's output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

MakeLinear = Callable[[int, int, bool], nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Where adapters lie, and how large they are; rank 0 means none."""

    rank: int = 0
    alpha: float = 16.0
    dropout_fraction: float = 0.05
    query: bool = True
    key: bool = False
    value: bool = True
    projection: bool = False
    mlp: bool = False
    head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a decoder is built from."""

    num_layers: int
    width: int
    num_heads: int
    num_groups: int
    hidden_width: int
    vocabulary: int
    length: int
    is_llama: bool
    """RMSNorm and gated layers without biases, instead of LayerNorm and GELU with them."""
    rotary_fraction: float = 1.0
    has_parallel_residual: bool = False
    """Whether attention and MLP read one norm's output and are added up together."""
    has_head_bias: bool = False
    adapters: Adapters = field(default_factory=Adapters)
    make_linear: MakeLinear = lambda n_in, n_out, bias: nn.Linear(n_in, n_out, bias=bias)

    @property
    def head_width(self) -> int:
        """Return the width of one head."""
        return self.width // self.num_heads

    @property
    def num_rotated(self) -> int:
        """Return how many values of a head are rotated."""
        return int(self.rotary_fraction * self.head_width)


class RMSNorm(nn.Module):
    """Normalise in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is normalised and scaled, in the dtype of ``x``."""
        dtype = x.dtype
        x = x.float()
        normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5)
        return self.weight * normed.to(dtype=dtype)


class LoRALinear(nn.Module):
    """A linear layer with an adapter beside it."""

    def __init__(self, n_in: int, n_out: int, bias: bool, config: Configuration, on: bool) -> None:
        super().__init__()
        self.linear = config.make_linear(n_in, n_out, bias)
        self.rank = config.adapters.rank if on else 0
        if self.rank:
            self.lora_A = nn.Parameter(torch.zeros(self.rank, n_in))
            self.lora_B = nn.Parameter(torch.zeros(n_out, self.rank))
            self.dropout = nn.Dropout(config.adapters.dropout_fraction)
            self.scaling = config.adapters.alpha / self.rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, with the adapter's added."""
        pretrained = self.linear(x)
        if not self.rank:
            return pretrained
        return (
            pretrained
            + (self.dropout(x) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1))
            * self.scaling
        )


class LoRAQKVLinear(nn.Module):
    """The fused layer of query, key and value with one adapter for those that have it."""

    def __init__(self, config: Configuration, bias: bool) -> None:
        super().__init__()
        adapters, width = config.adapters, config.width
        kv_width = config.head_width * config.num_groups
        self.num_out = width + 2 * kv_width
        self.linear = config.make_linear(width, self.num_out, bias)
        self.enabled = (adapters.query, adapters.key, adapters.value)
        self.rank = adapters.rank if any(self.enabled) else 0
        if not self.rank:
            return
        self.is_grouped = config.num_groups != config.num_heads
        self.widths = [
            each for each, on in zip((width, kv_width, kv_width), self.enabled, strict=True) if on
        ]
        self.lora_A = nn.Parameter(torch.zeros(self.rank * len(self.widths), width))
        self.lora_B = nn.Parameter(torch.zeros(sum(self.widths), self.rank))
        self.dropout = nn.Dropout(adapters.dropout_fraction)
        self.scaling = adapters.alpha / self.rank
        self.index = list(range(sum(self.widths)))  # which places these are changes no size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return query, key and value in one tensor."""
        pretrained = self.linear(x)
        if not self.rank:
            return pretrained
        after_a = F.linear(self.dropout(x), self.lora_A)
        after_b = self._convolved(after_a.transpose(-2, -1)).transpose(-2, -1)
        return pretrained + self._padded(after_b * self.scaling)

    def _convolved(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.lora_B.unsqueeze(-1)
        if not self.is_grouped:
            return F.conv1d(x, weight, groups=len(self.widths))
        pieces = zip(x.chunk(len(self.widths), dim=1), weight.split(self.widths), strict=True)
        return torch.cat([F.conv1d(a, b) for a, b in pieces], dim=1)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """Put the values among zeros, as wide as the layer's output."""
        if all(self.enabled):
            return x
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], self.num_out)).view(-1, self.num_out)
        result = result.index_copy(
            1, torch.tensor(self.index, device=x.device), x.reshape(-1, sum(self.widths))
        )
        return result.view((*x.shape[:-1], self.num_out)).transpose(0, 1)


def roped(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate by position."""
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).type_as(x)


class Attention(nn.Module):
    """Attend causally."""

    def __init__(self, config: Configuration) -> None:
        super().__init__()
        bias = not config.is_llama
        self.attn = LoRAQKVLinear(config, bias)
        self.proj = LoRALinear(config.width, config.width, bias, config, config.adapters.projection)
        self.config = config

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return what is attended to."""
        config, (batch, length, width) = self.config, x.size()
        per_group = config.num_heads // config.num_groups
        qkv = self.attn(x).view(batch, length, config.num_groups, per_group + 2, config.head_width)
        q, k, v = qkv.permute(0, 2, 3, 1, 4).split((per_group, 1, 1), dim=2)
        if config.num_groups != config.num_heads:
            wide = (batch, config.num_groups, per_group, length, config.head_width)
            k, v = k.expand(*wide), v.expand(*wide)
        q, k, v = (each.reshape(batch, -1, length, config.head_width) for each in (q, k, v))
        count = config.num_rotated
        q, k = (
            torch.cat((roped(each[..., :count], cos, sin), each[..., count:]), dim=-1)
            for each in (q, k)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=0.0, scale=1.0 / math.sqrt(config.head_width), is_causal=True
        )
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """The layers behind attention, with GELU or gated."""

    def __init__(self, config: Configuration) -> None:
        super().__init__()
        self.is_gated = config.is_llama
        bias, on = not config.is_llama, config.adapters.mlp
        sizes = (config.width, config.hidden_width)
        self.fc_1 = LoRALinear(*sizes, bias, config, on)
        if self.is_gated:
            self.fc_2 = LoRALinear(*sizes, bias, config, on)
        self.proj = LoRALinear(*reversed(sizes), bias, config, on)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layers' output."""
        if not self.is_gated:
            return self.proj(F.gelu(self.fc_1(x)))
        first, second = self.fc_1(x), self.fc_2(x)
        return self.proj(F.silu(first) * second)


class Block(nn.Module):
    """Attention and MLP."""

    def __init__(self, config: Configuration) -> None:
        super().__init__()
        make = RMSNorm if config.is_llama else nn.LayerNorm
        self.norm_1 = make(config.width)
        self.attn = Attention(config)
        self.norm_2 = None if config.has_parallel_residual else make(config.width)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        normed = self.norm_1(x)
        h = self.attn(normed, cos, sin)
        if self.norm_2 is None:
            return self.mlp(normed) + h + x
        x = h + x
        return self.mlp(self.norm_2(x)) + x


class GPT(nn.Module):
    """The whole model."""

    def __init__(self, config: Configuration) -> None:
        super().__init__()
        self.lm_head = LoRALinear(
            config.width, config.vocabulary, config.has_head_bias, config, config.adapters.head
        )
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = (RMSNorm if config.is_llama else nn.LayerNorm)(config.width)
        angles = torch.zeros(config.length, config.num_rotated)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor, chunk: int = 0) -> torch.Tensor | list[torch.Tensor]:
        """Return the logits, as a list of chunks of so many tokens if asked for."""
        length = tokens.size(1)
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        if chunk:
            return [self.lm_head(each) for each in x.split(chunk, dim=1)]
        return self.lm_head(x)
