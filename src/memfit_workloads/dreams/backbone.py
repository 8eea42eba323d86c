"""The DreaMS transformer: peaks to tokens, tokens through encoder blocks.

Shapes: B spectra, N tokens (the precursor first), D the width of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import PeakAttention, key_bias, pairwise_bias
from .fourier import FourierBranch
from .sizes import PAIRWISE, DreamsSizes

_MZ_SCALE = 1000.0


class EncoderBlock(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a residual."""

    def __init__(self, sizes: DreamsSizes) -> None:
        super().__init__()
        width = sizes.d_model
        self.norm_attention = nn.LayerNorm(width)
        self.attention = PeakAttention(sizes)
        self.norm_forward = nn.LayerNorm(width)
        self.forward_in = nn.Linear(width, 4 * width, bias=False)
        self.forward_out = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, tokens: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
        """Return the next tokens, (B, N, D)."""
        attended = self.attention(self.norm_attention(tokens), bias, padding)
        tokens = tokens + self.dropout(attended)
        hidden = self.dropout(torch.relu(self.forward_in(self.norm_forward(tokens))))
        return tokens + self.dropout(self.forward_out(hidden))


class DreamsBackbone(nn.Module):
    """From a padded batch of spectra to one vector per peak; the first is the spectrum's."""

    def __init__(self, sizes: DreamsSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.fourier = FourierBranch(sizes)
        self.peak = nn.Linear(2, sizes.d_peak)
        self.blocks = nn.ModuleList(EncoderBlock(sizes) for _ in range(sizes.n_layers))
        self.norm = nn.LayerNorm(sizes.d_model)

    def forward(self, spectra: Tensor) -> Tensor:
        """Return the tokens after the last block.

        Args:
            spectra: (B, N, 2) float64, m/z and intensity; m/z 0 is padding, -1 is masked.

        Returns:
            (B, N, D); rows of padding mean nothing.
        """
        mz_BN, intensity_BN = spectra.unbind(-1)
        fourier = self.fourier(mz_BN)
        dtype = self.peak.weight.dtype
        small = torch.stack([mz_BN / _MZ_SCALE, intensity_BN], -1).to(dtype)
        tokens = torch.cat([fourier, torch.relu(self.peak(small)).to(fourier.dtype)], -1)
        bias = pairwise_bias(fourier) if self.sizes.bias_form == PAIRWISE else key_bias(fourier)
        padding = torch.zeros(mz_BN.shape, dtype=tokens.dtype, device=tokens.device)
        padding = padding.masked_fill(mz_BN == 0, -torch.inf)[:, None, None, :]
        for block in self.blocks:
            tokens = block(tokens, bias, padding)
        return self.norm(tokens)

    def embed(self, spectra: Tensor) -> Tensor:
        """Return the embedding of each spectrum, (B, D): the precursor's token."""
        return self(spectra)[:, 0]
