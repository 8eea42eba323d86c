"""From the texts of a code to a point of hyperbolic space. Shape suffixes: N rows, D features."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .encoders import ChannelEncoders, EncoderSizes
from .experts import MixtureOfExperts
from .lorentz import LorentzProjection
from .texts import CHANNELS


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderSizes:
    """What an embedder is."""

    encoder: EncoderSizes = field(default_factory=EncoderSizes)
    num_experts: int = 4
    top_k: int = 2
    expert_hidden: int = 1024
    expert_dropout: float = 0.1
    residual: bool = True
    """Whether experts add to what they are given."""
    unit_length: bool = False
    """Whether what the experts' mixture is fused to gets length 1 before it is projected."""
    curvature: float = 1.0
    max_norm: float = 2.0
    start_norm: float = 0.75
    """How long a mean of vectors of length 1 is made, at the start."""


class Embedded(NamedTuple):
    """What the embedder makes of rows, each of its own row."""

    points: Tensor
    """(N, D + 1), on the hyperboloid."""
    gates: Tensor
    """(N, E), logits of the gate."""


class NaicsEmbedder(nn.Module):
    """Encode four texts, mix them by experts, and project them onto the hyperboloid.

    It treats rows separately, so its rows may be run in pieces; what needs all of them, such as the
    balance of the experts, is taken on its results.

    With `EmbedderSizes.residual` it begins as the mean of the four vectors: its distances are at
    first those of the encoder.
    """

    def __init__(self, sizes: EmbedderSizes) -> None:
        super().__init__()
        width = sizes.encoder.width
        self.encoders = ChannelEncoders(sizes.encoder)
        self.experts = MixtureOfExperts(
            width * len(CHANNELS),
            hidden=sizes.expert_hidden,
            num_experts=sizes.num_experts,
            top_k=sizes.top_k,
            dropout=sizes.expert_dropout,
            is_residual=sizes.residual,
        )
        self._has_unit_length = sizes.unit_length
        self.fuse = nn.Linear(width * len(CHANNELS), width)
        self.projection = LorentzProjection(width, sizes.curvature, sizes.max_norm)
        if sizes.residual:
            _begin_as_mean(self.fuse, self.projection.linear, sizes.start_norm)

    def forward(self, tokens: dict[str, Tensor]) -> Embedded:
        """Embed rows of tokens, (N, L) of each channel."""
        mixed_ND, gate_NE = self.experts(self.encoders(tokens).flatten(1))
        fused_ND = self.fuse(mixed_ND)
        if self._has_unit_length:
            fused_ND = F.normalize(fused_ND, dim=1)
        return Embedded(self.projection(fused_ND), gate_NE)


@torch.no_grad()
def _begin_as_mean(fuse: nn.Linear, linear: nn.Linear, scale: float) -> None:
    """Have two layers give the mean of all channels, times a scale, in the space coordinates."""
    width, num_channels = fuse.out_features, len(CHANNELS)
    fuse.weight.copy_(torch.eye(width).repeat(1, num_channels) / num_channels)
    fuse.bias.zero_()
    linear.weight[1:].copy_(torch.eye(width) * scale)
    linear.bias.zero_()
