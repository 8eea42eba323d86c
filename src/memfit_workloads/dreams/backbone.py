"""The DreaMS transformer: peaks to tokens, tokens through encoder blocks.

Shapes: B spectra, N tokens (the precursor first), D the width of a token.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fourier import FourierBranch
from .sizes import FUSED, PAIRWISE, DreamsSizes

_MZ_SCALE = 1000.0
_ALIGNED = 8
"""Fused kernels want head widths that are multiples of this."""


class EncoderBlock(nn.Module):
    """Attention and a feed-forward network, each after a norm and beside a residual."""

    def __init__(self, sizes: DreamsSizes) -> None:
        super().__init__()
        width = sizes.d_model
        self.norm_attention = nn.LayerNorm(width)
        self.attention = _PeakAttention(sizes)
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


def key_bias(fourier: Tensor) -> Tensor:
    """Return the bias of each key.

    The document adds to the logit of query i and key j the sum over features of ``f_i - f_j``, from
    a tensor of (B, N, N, d_fourier). With ``s`` the sum over the features, that is ``s_i - s_j``;
    ``s_i`` is the same for all keys of a query and leaves the softmax unchanged. What remains is
    ``-s_j``.

    Shapes: B spectra, N tokens, H heads, E width of a head.

    Args:
        fourier: (B, N, d_fourier).

    Returns:
        (B, 1, 1, N), to be added to the logits of all heads and queries.
    """
    return -fourier.sum(-1)[:, None, None, :]


def pairwise_bias(fourier: Tensor) -> Tensor:
    """Return the bias as the document computes it, from (B, N, N, d_fourier) differences.

    Returns:
        (B, 1, N, N), equal to `key_bias` up to a term that no softmax over keys notices.
    """
    return (fourier[:, :, None, :] - fourier[:, None, :, :]).sum(-1)[:, None]


class _PeakAttention(nn.Module):
    """Multi-head attention without biases; padded peaks are seen by nobody."""

    def __init__(self, sizes: DreamsSizes) -> None:
        super().__init__()
        self._num_heads = sizes.n_heads
        self._is_fused = sizes.attention == FUSED and sizes.bias_form != PAIRWISE
        self._dropout = sizes.dropout
        self.qkv = nn.Linear(sizes.d_model, 3 * sizes.d_model, bias=False)
        self.out = nn.Linear(sizes.d_model, sizes.d_model, bias=False)

    def forward(self, tokens: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
        """Let every token attend to all real ones.

        Args:
            tokens: (B, N, d_model).
            bias: (B, 1, 1, N), or (B, 1, N, N).
            padding: (B, 1, 1, N), 0 at tokens and minus infinity at padding.

        Returns:
            (B, N, d_model).
        """
        qkv = self.qkv(tokens).unflatten(-1, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4)
        attend = self._fused if self._is_fused else self._plain
        return self.out(attend(qkv, bias, padding).transpose(1, 2).flatten(2))

    def _plain(self, qkv: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
        query, key, value = qkv.unbind(0)
        logits = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = torch.softmax(logits + bias + padding, dim=-1)
        return F.dropout(weights, self._dropout, self.training) @ value

    def _fused(self, qkv: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
        """Carry the bias as one more column of query and key.

        A mask that needs a gradient makes torch build all logits; a column does not.
        """
        query, key, value = qkv.unbind(0)
        width = query.shape[-1]
        fill = (-(width + 1)) % _ALIGNED
        scale = 1 / math.sqrt(width)
        ones = query.new_ones(()).expand(*query.shape[:-1], 1)
        biases = (bias / scale).to(key.dtype).movedim(-1, -2).expand(*key.shape[:-1], 1)
        attended = F.scaled_dot_product_attention(
            F.pad(torch.cat([query, ones], -1), (0, fill)),
            F.pad(torch.cat([key, biases], -1), (0, fill)),
            F.pad(value, (0, fill + 1)),
            attn_mask=padding.to(query.dtype),
            dropout_p=self._dropout if self.training else 0.0,
            scale=scale,
        )
        return attended[..., :width]
