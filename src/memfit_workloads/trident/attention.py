"""Transformer layers whose attention is torch's fused one.

Shape suffixes: B samples, L tokens, D width.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Attend among all tokens of a sample, by ``F.scaled_dot_product_attention``.

    Weights are laid out as in ``nn.MultiheadAttention`` (query, key and value stacked), so that
    its state loads by name after ``in_proj_`` is renamed ``query_key_value.``.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Take and give (B, L, D)."""
        parts = self.query_key_value(x_BLD).chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        out: Tensor = self.out_proj(attended.transpose(1, 2).flatten(-2))
        return out


class TransformerLayer(nn.Module):
    """Attention and a feed-forward net, each with a residual connection and a norm after it."""

    def __init__(self, width: int, num_heads: int, feedforward: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width, num_heads)
        self.norm_of_attention = nn.LayerNorm(width)
        self.feedforward = nn.Sequential(
            nn.Linear(width, feedforward), nn.GELU(), nn.Linear(feedforward, width)
        )
        self.norm_of_feedforward = nn.LayerNorm(width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Take and give (B, L, D)."""
        x_BLD = self.norm_of_attention(x_BLD + self.attention(x_BLD))
        out: Tensor = self.norm_of_feedforward(x_BLD + self.feedforward(x_BLD))
        return out
