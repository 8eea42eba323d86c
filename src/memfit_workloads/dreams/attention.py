"""Attention among peaks, with the bias of the Fourier differences as one number per key.

The document adds to the logit of query i and key j the sum over features of ``f_i - f_j``, from a
tensor of (B, N, N, d_fourier). With ``s`` the sum over the features, that is ``s_i - s_j``; ``s_i``
is the same for all keys of a query and leaves the softmax unchanged. What remains is ``-s_j``.

Shapes: B spectra, N tokens, H heads, E width of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .sizes import FUSED, PAIRWISE, DreamsSizes

_ALIGNED = 8
"""Fused kernels want head widths that are multiples of this."""


def key_bias(fourier: Tensor) -> Tensor:
    """Return the bias of each key.

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


class PeakAttention(nn.Module):
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
