"""CrossAttnFusion: the branches' embeddings, attending to each other, and two nested outcomes.

Shape suffixes: B samples, L the four modalities, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .attention import TransformerLayer
from .sizes import TridentSizes

MODALITIES = ("rgb", "infrared", "kinematics", "class")


class Outcomes(NamedTuple):
    """Logits of the two outcomes; the sigmoid of each is its probability."""

    event: Tensor
    """(B,)."""
    severe: Tensor
    """(B,), never above ``event``: a severe event is an event."""
    severe_alone: Tensor
    """(B,), what the second head says by itself; may contradict the first."""


class CrossAttnFusion(nn.Module):
    """Give each branch a token, let the tokens attend to each other, and read two outcomes off."""

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        width = sizes.fusion_width
        dims = (sizes.image_dim, sizes.thermal_dim, sizes.motion_dim, sizes.class_dim)
        self.project = nn.ModuleDict(
            {name: nn.Linear(dim, width) for name, dim in zip(MODALITIES, dims, strict=True)}
        )
        self.modality = nn.Parameter(0.02 * torch.randn(len(MODALITIES), width))
        self.layers = nn.ModuleList(
            TransformerLayer(width, sizes.fusion_heads, sizes.fusion_feedforward)
            for _ in range(sizes.fusion_layers)
        )
        self.embed = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.event = _head(width, sizes.head_hidden)
        self.severe = _head(width, sizes.head_hidden)

    def forward(self, embeddings: Mapping[str, Tensor]) -> Outcomes:
        """Fuse the embeddings of the modalities, (B, E) each of its own width."""
        tokens = [self.project[name](embeddings[name]) for name in MODALITIES]
        x_BLD = torch.stack(tokens, dim=1) + self.modality
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        fused_BD = self.embed(x_BLD.mean(dim=1))
        event, severe = (head(fused_BD).squeeze(1) for head in (self.event, self.severe))
        # The sigmoid is monotonic: the lower logit has the lower probability.
        return Outcomes(event, torch.minimum(severe, event), severe)


def _head(width: int, hidden: int) -> nn.Sequential:
    narrow = max(hidden // 4, 1)
    return nn.Sequential(
        nn.Linear(width, hidden),
        nn.GELU(),
        nn.Linear(hidden, narrow),
        nn.GELU(),
        nn.Linear(narrow, 1),
    )
