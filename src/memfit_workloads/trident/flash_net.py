"""FlashNet-V: how the brightness of a clip runs over time.

Shape suffixes: B samples, T frames, H height, W width, C channels, E embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sizes import TridentSizes

_GRID = (4, 4)
_KERNEL = 5


class FlashNetV(nn.Module):
    """Convolve the colours of a coarse grid over time; sudden light gives a strong answer.

    The document names this network and its temporal convolution and says no more of it; this
    definition is memfit's: two temporal convolutions over 4 x 4 averaged cells, whose mean and
    largest answer make the embedding. It is as wide as the rest of the RGB branch, to which it is
    added.
    """

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        channels = sizes.flash_channels
        self.temporal = nn.Sequential(
            nn.Conv1d(3 * _GRID[0] * _GRID[1], channels, _KERNEL, padding=_KERNEL // 2),
            nn.GELU(),
            nn.Conv1d(channels, channels, _KERNEL, padding=_KERNEL // 2),
            nn.GELU(),
        )
        self.embed = nn.Linear(2 * channels, sizes.image_dim)

    def forward(self, clip_B3THW: Tensor) -> Tensor:
        """Turn clips (B, 3, T, H, W) into (B, E)."""
        frames = clip_B3THW.transpose(1, 2).flatten(2, 3)  # (B, T, 3 H, W)
        height = clip_B3THW.shape[3]
        cells = F.adaptive_avg_pool2d(
            frames.unflatten(2, (3, height)).flatten(1, 2), _GRID
        )  # (B, 3 T, 4, 4)
        cells_BTC = cells.unflatten(1, (-1, 3)).flatten(2)
        answer_BCT = self.temporal(cells_BTC.transpose(1, 2))
        summary = torch.cat([answer_BCT.mean(dim=2), answer_BCT.amax(dim=2)], dim=1)
        embedding: Tensor = self.embed(summary)
        return embedding
