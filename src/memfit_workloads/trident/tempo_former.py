"""TinyTempoFormer: three moments of a motion, attending to each other.

Shape suffixes: B samples, M moments, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import TransformerLayer
from .kine_feat import NUM_MOMENTS, NUM_TOKEN_FEATURES
from .sizes import TridentSizes

_NUM_LAYERS = 2


class TinyTempoFormer(nn.Module):
    """Encode three tokens of 32 features by two transformer layers."""

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        width = sizes.tempo_width
        self.project = nn.Linear(NUM_TOKEN_FEATURES, width)
        self.position = nn.Parameter(0.02 * torch.randn(NUM_MOMENTS, width))
        self.layers = nn.ModuleList(
            TransformerLayer(width, sizes.tempo_heads, sizes.tempo_feedforward)
            for _ in range(_NUM_LAYERS)
        )
        self.embed = nn.Sequential(
            nn.Linear(NUM_MOMENTS * width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, tokens_BMF: Tensor) -> Tensor:
        """Turn tokens (B, 3, 32) into (B, D)."""
        x_BMD = self.project(tokens_BMF) + self.position
        for layer in self.layers:
            x_BMD = layer(x_BMD)
        embedding: Tensor = self.embed(x_BMD.flatten(1))
        return embedding
