"""DualVisionV2: two frames of a clip, compared by a siamese encoder and a transformer.

Shape suffixes: B samples, H height, W width, L tokens of one frame, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import TransformerLayer
from .sizes import TridentSizes

_NUM_GROUPS = 8
_NUM_LAYERS = 2


class ChangeFeatures(NamedTuple):
    """What differs between the two frames."""

    embedding: Tensor
    """(B, D)."""
    mask_logits: Tensor
    """(B, 1, 8 h, 8 w) over the grid of h x w tokens: where something has changed."""
    delta: Tensor
    """(B, D): how much has changed, and in what way."""


class DualVisionV2(nn.Module):
    """Encode frames T/4 and 3T/4 alike, let their tokens attend to each other, and subtract.

    The encoder is the document's fallback, a small convolutional network of stride 16; its feature
    maps are averaged over a grid, so that the positional parameter has one size for every frame.
    """

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        width = sizes.vision_width
        self.grid = (sizes.vision_grid_height, sizes.vision_grid_width)
        channels = [width // 8, width // 4, width // 2, width]
        pairs = zip([3, *channels[:-1]], channels, strict=True)
        self.encoder = nn.Sequential(*(_encoder_block(a, b) for a, b in pairs))
        self.project = nn.Linear(width, width)
        num_tokens = 2 * self.grid[0] * self.grid[1]
        self.position = nn.Parameter(0.02 * torch.randn(num_tokens, width))
        self.layers = nn.ModuleList(
            TransformerLayer(width, sizes.vision_heads, sizes.vision_feedforward)
            for _ in range(_NUM_LAYERS)
        )
        self.mask = nn.Sequential(
            nn.ConvTranspose2d(width, width // 2, 2, stride=2),
            nn.GELU(),
            nn.ConvTranspose2d(width // 2, width // 4, 2, stride=2),
            nn.GELU(),
            nn.ConvTranspose2d(width // 4, 1, 2, stride=2),
        )
        self.delta = nn.Linear(width, width)
        self.embed = nn.Linear(2 * width, width)

    def forward(self, clip_B3THW: Tensor) -> ChangeFeatures:
        """Compare two frames of clips (B, 3, T, H, W)."""
        num_frames = clip_B3THW.shape[2]
        frames = [clip_B3THW[:, :, num_frames // 4], clip_B3THW[:, :, 3 * num_frames // 4]]
        tokens_BLD = torch.cat([self._tokens(frame) for frame in frames], dim=1) + self.position
        for layer in self.layers:
            tokens_BLD = layer(tokens_BLD)
        before_BLD, after_BLD = tokens_BLD.chunk(2, dim=1)
        change_BLD = after_BLD - before_BLD
        change_BDhw = change_BLD.transpose(1, 2).unflatten(2, self.grid)
        delta_BD = self.delta(change_BLD.mean(dim=1))
        summary = torch.cat([tokens_BLD.mean(dim=1), delta_BD], dim=1)
        return ChangeFeatures(self.embed(summary), self.mask(change_BDhw), delta_BD)

    def _tokens(self, frame_B3HW: Tensor) -> Tensor:
        """Turn a frame into (B, L, D)."""
        maps = F.adaptive_avg_pool2d(self.encoder(frame_B3HW), self.grid)
        # In order in memory, so that one sample is multiplied as several are.
        tokens: Tensor = self.project(maps.flatten(2).transpose(1, 2).contiguous())
        return tokens


def _encoder_block(channels_in: int, channels_out: int) -> nn.Sequential:
    num_groups = min(_NUM_GROUPS, channels_out)
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1),
        nn.GroupNorm(num_groups, channels_out),
        nn.GELU(),
    )
