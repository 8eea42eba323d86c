"""PlumeDetXL: finds warm spots in every infrared frame.

Shape suffixes: B samples, N frames of all samples, T frames, C channels, h and w a quarter of the
frame's sides, E embedding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sizes import TridentSizes

STRIDE = 4
"""Pixels of a frame per cell of a map, along each side."""
_NUM_GROUPS = 8
_MAPS = {"heatmap": 1, "offset": 2, "size": 2, "intensity": 1}
_RARE_LOGIT = -2.19
"""Start of the heatmap's bias: sigmoid gives 0.1 (Lin et al. 2017, arXiv 1708.02002, 4.1)."""


class DetectionMaps(NamedTuple):
    """What a frame holds where, as in CenterNet (Zhou et al. 2019, arXiv 1904.07850)."""

    heatmap: Tensor
    """(B, T, 1, h, w), logits of a centre."""
    offset: Tensor
    """(B, T, 2, h, w), of the centre in its cell, x and y in cells."""
    size: Tensor
    """(B, T, 2, h, w), width and height in cells."""
    intensity: Tensor
    """(B, T, 1, h, w), from 0 to 1."""


class PlumeFeatures(NamedTuple):
    """What the detector sees in a clip."""

    embedding: Tensor
    """(B, E), of the features averaged over time."""
    maps: DetectionMaps


class MapHead(nn.Sequential):
    """Read maps off the joined features."""

    def __init__(self, width: int, num_maps: int) -> None:
        last = nn.Conv2d(width // 2, num_maps, 1)
        super().__init__(nn.Conv2d(width, width // 2, 3, padding=1), nn.GELU(), last)
        if last.bias is not None and num_maps == 1:
            nn.init.constant_(last.bias, _RARE_LOGIT)


class PlumeDetXL(nn.Module):
    """Encode each frame in levels, join them from coarse to fine, and read four maps off.

    All frames go through at once: a loop over them gives the same numbers, slower.
    """

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        width, depth = sizes.plume_width, sizes.plume_depth
        self.stem = _block(1, width, 5, STRIDE)
        self.levels = nn.ModuleList(
            _block(width, width, 3, 1 if level == 0 else 2) for level in range(depth)
        )
        self.laterals = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(depth))
        self.smooth = nn.Conv2d(width, width, 3, padding=1)
        self.heads = nn.ModuleDict({name: MapHead(width, num) for name, num in _MAPS.items()})
        self.embed = nn.Sequential(
            nn.Linear(depth * width, sizes.plume_dim),
            nn.GELU(),
            nn.Linear(sizes.plume_dim, sizes.plume_dim),
        )

    def forward(self, clip_B1THW: Tensor) -> PlumeFeatures:
        """Look at infrared clips (B, 1, T, H, W) with values from 0 to 1."""
        num_samples, _, num_frames, _, _ = clip_B1THW.shape
        x = self.stem(clip_B1THW.transpose(1, 2).flatten(0, 1))
        levels = []
        for level in self.levels:
            x = level(x)
            levels.append(x)
        fine = self._joined(levels)
        shape = (num_samples, num_frames)
        maps = DetectionMaps(*(self.heads[name](fine).unflatten(0, shape) for name in _MAPS))
        pooled_NC = torch.cat([each.amax(dim=(2, 3)) for each in levels], dim=1)
        embedding_BE = self.embed(pooled_NC.unflatten(0, shape).mean(dim=1))
        return PlumeFeatures(embedding_BE, maps._replace(intensity=maps.intensity.sigmoid()))

    def _joined(self, levels: list[Tensor]) -> Tensor:
        """Add the levels up from coarse to fine: (N, C, h, w)."""
        joined = self.laterals[-1](levels[-1])
        for lateral, level in zip(self.laterals[-2::-1], levels[-2::-1], strict=True):
            fine = lateral(level)
            joined = fine + F.interpolate(joined, size=fine.shape[2:], mode="nearest")
        out: Tensor = self.smooth(joined)
        return out


def _block(channels_in: int, channels_out: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2),
        nn.GroupNorm(_NUM_GROUPS, channels_out),
        nn.GELU(),
    )
