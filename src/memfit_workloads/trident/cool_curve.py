"""CoolCurve3: how warm the warmest spots are at three moments, and how fast they cool.

Shape suffixes: B samples, K curves, h and w the sides of the maps, E embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .plume_det import DetectionMaps
from .sizes import TridentSizes

NUM_CURVES, NUM_POINTS = 10, 3
_NUM_FEATURES = 6


class CoolCurve3(nn.Module):
    """Turn up to 10 curves of three points, their slopes and their bend into an embedding."""

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        hidden = sizes.curve_hidden
        self.layers = nn.Sequential(
            nn.Linear(NUM_CURVES * _NUM_FEATURES, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, sizes.curve_dim),
        )

    def forward(self, curves_BK3: Tensor) -> Tensor:
        """Turn curves (B, 10, 3), from 0 to 1 and 0 where there are fewer, into (B, E)."""
        slopes = curves_BK3.diff(dim=2)
        features = torch.cat([curves_BK3, slopes, slopes.diff(dim=2)], dim=2)
        embedding: Tensor = self.layers(features.flatten(1))
        return embedding


def curves_of(maps: DetectionMaps, clip_B1THW: Tensor) -> Tensor:
    """Read the warmth of the likeliest spots at three moments off a clip: (B, 10, 3).

    Spots are the cells with the highest heatmap on average over time; the choice has no gradient,
    what is read there has: the mean of the intensity that the detector gives and of what the camera
    has seen in that cell. Moments are the middles of the thirds of a clip.
    """
    num_frames, (height, width) = maps.heatmap.shape[1], maps.heatmap.shape[3:]
    moments = [(2 * third + 1) * num_frames // 6 for third in range(NUM_POINTS)]
    likeliness = maps.heatmap.detach().mean(dim=(1, 2)).flatten(1)
    num_curves = min(NUM_CURVES, height * width)
    cells = likeliness.topk(num_curves, dim=1).indices
    seen = nn.functional.adaptive_max_pool2d(clip_B1THW[:, 0, moments], (height, width))
    warmth = (0.5 * (seen + maps.intensity[:, moments, 0])).flatten(2)
    curves = warmth.gather(2, cells[:, None].expand(-1, NUM_POINTS, -1)).transpose(1, 2)
    missing = NUM_CURVES - num_curves
    return nn.functional.pad(curves, (0, 0, 0, missing)) if missing else curves
