"""VideoFrag3Dv2: a 3-D U-Net over the RGB clip, which gives a mask per frame and an embedding.

Shape suffixes: B samples, C channels, T frames, H height, W width, E embedding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sizes import TridentSizes

_NUM_GROUPS = 8
_NUM_LEVELS = 3


class VideoFeatures(NamedTuple):
    """What the network sees in a clip."""

    embedding: Tensor
    """(B, E)."""
    mask_logits: Tensor
    """(B, T, 1, H, W), before the sigmoid."""


class ConvBlock3d(nn.Sequential):
    """One convolution of 3 x 3 x 3, group norm and GELU."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(
            nn.Conv3d(channels_in, channels_out, 3, padding=1),
            nn.GroupNorm(_NUM_GROUPS, channels_out),
            nn.GELU(),
        )


class UpBlock3d(nn.Module):
    """Double the resolution, join what the same level has seen on the way down, and convolve."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(channels_in, channels_out, 2, stride=2)
        self.block = ConvBlock3d(2 * channels_out, channels_out)

    def forward(self, x_BCTHW: Tensor, skip_BCTHW: Tensor) -> Tensor:
        """Take (B, 2C, T/2, H/2, W/2) and (B, C, T, H, W); give (B, C, T, H, W)."""
        x_BCTHW = _resized(self.up(x_BCTHW), skip_BCTHW)
        out: Tensor = self.block(torch.cat([x_BCTHW, skip_BCTHW], dim=1))
        return out


class VideoFrag3Dv2(nn.Module):
    """Three levels of 3-D convolutions down and up again, with a mask head and an embedding.

    Channels are C, 2C, 4C and 8C at the bottom; each way down halves frames, height and width.
    """

    def __init__(self, sizes: TridentSizes) -> None:
        super().__init__()
        channels = [sizes.video_channels * 2**level for level in range(_NUM_LEVELS + 1)]
        levels_down = zip([3, *channels[:-2]], channels[:-1], strict=True)
        self.encoder = nn.ModuleList(ConvBlock3d(a, b) for a, b in levels_down)
        self.down = nn.ModuleList(nn.Conv3d(c, c, 2, stride=2) for c in channels[:-1])
        self.bottleneck = ConvBlock3d(channels[-2], channels[-1])
        levels_up = zip(channels[:0:-1], channels[-2::-1], strict=True)
        self.decoder = nn.ModuleList(UpBlock3d(a, b) for a, b in levels_up)
        self.mask = nn.Conv3d(channels[0], 1, 1)
        self.embed = nn.Sequential(
            nn.Linear(channels[-1], channels[-1]),
            nn.GELU(),
            nn.Linear(channels[-1], sizes.video_dim),
        )

    def forward(self, clip_B3THW: Tensor) -> VideoFeatures:
        """Look at clips (B, 3, T, H, W) with values from 0 to 1."""
        x, skips = clip_B3THW, []
        for block, down in zip(self.encoder, self.down, strict=True):
            skips.append(block(x))
            x = down(skips[-1])
        x = self.bottleneck(x)
        embedding_BE = self.embed(x.mean(dim=(2, 3, 4)))
        for up in self.decoder:
            x = up(x, skips.pop())
        mask_logits = self.mask(x).transpose(1, 2)
        return VideoFeatures(embedding_BE, mask_logits)

    def embed_clip(self, clip_B3THW: Tensor) -> Tensor:
        """Give the embedding alone, without the way up and without what it needs kept."""
        x = clip_B3THW
        for block, down in zip(self.encoder, self.down, strict=True):
            x = down(block(x))
        embedding: Tensor = self.embed(self.bottleneck(x).mean(dim=(2, 3, 4)))
        return embedding


def _resized(x_BCTHW: Tensor, like: Tensor) -> Tensor:
    """Interpolate to the size of another level, where an odd side was halved."""
    if x_BCTHW.shape[2:] == like.shape[2:]:
        return x_BCTHW
    return F.interpolate(x_BCTHW, size=like.shape[2:], mode="trilinear", align_corners=False)
