"""Fourier features of m/z, and the first layer over them, a few frequencies at a time.

Shapes: M peaks, F frequencies, H outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .sizes import DreamsSizes


def frequencies_of(mz_accuracy: float) -> Tensor:
    """Return the frequencies in 1/Da: 1/(accuracy i) for even i below 1/accuracy, 1/i up to 999.

    Source: Bushuiev et al. 2025: 5997 frequencies at 1e-4 Da.

    Returns:
        (F,) float64.
    """
    highest = round(1 / mz_accuracy)
    fine = 1 / (mz_accuracy * torch.arange(2, highest, 2, dtype=torch.float64))
    return torch.cat([fine, 1 / torch.arange(2, 1000, dtype=torch.float64)])


def _parts(mz_M: Tensor, frequencies_F: Tensor, dtype: torch.dtype, chunk: int) -> Iterator[Any]:
    """Yield the slice of each chunk of frequencies with its cosines and sines, (M, chunk) each."""
    for start in range(0, len(frequencies_F), chunk):
        own = slice(start, start + chunk)
        # In double precision: at m/z 1000 and a period of 2e-4 single precision has no phase left.
        turns = mz_M[:, None] * frequencies_F[own]
        phase = turns.sub_(turns.floor()).mul_(2 * math.pi).to(dtype)
        yield own, phase.cos(), phase.sin_()


class _FourierLinear(torch.autograd.Function):
    """A linear layer over Fourier features that are made again in backward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        """Add the layer up over chunks of frequencies.

        Args:
            ctx: what backward is told.
            given: m/z (M,), frequencies (F,), weight (H, 2F), bias (H,), and the chunk's length.
        """
        mz_M, frequencies_F, weight, bias_H, chunk = given
        ctx.save_for_backward(mz_M, frequencies_F)
        ctx.chunk, ctx.weight_dtype = chunk, weight.dtype
        num = len(frequencies_F)
        out_MH = bias_H.expand(len(mz_M), -1)
        for own, cosines, sines in _parts(mz_M, frequencies_F, weight.dtype, chunk):
            out_MH = torch.addmm(out_MH, cosines, weight[:, :num][:, own].t())
            out_MH = torch.addmm(out_MH, sines, weight[:, num:][:, own].t())
        return out_MH

    @staticmethod
    def backward(ctx: Any, grad_MH: Tensor) -> Any:
        """Return the gradients of weight and bias; m/z are data."""
        mz_M, frequencies_F = ctx.saved_tensors
        grad_MH = grad_MH.to(ctx.weight_dtype)
        of_cosines, of_sines = [], []
        for _, cosines, sines in _parts(mz_M, frequencies_F, grad_MH.dtype, ctx.chunk):
            of_cosines.append(grad_MH.t() @ cosines)
            of_sines.append(grad_MH.t() @ sines)
        # Put together, not written into slices: so it can be seen that samples are only added up.
        grad_weight = torch.cat([*of_cosines, *of_sines], dim=1)
        return None, None, grad_weight, grad_MH.sum(0), None


class FourierBranch(nn.Module):
    """From m/z to d_fourier features: cosines and sines, then a ReLU network."""

    frequencies: Tensor

    def __init__(self, sizes: DreamsSizes) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies_of(sizes.mz_accuracy), persistent=False)
        self.mz_accuracy = sizes.mz_accuracy
        self._chunk = sizes.fourier_chunk
        widths = [2 * len(self.frequencies), *[sizes.fourier_width] * (sizes.fourier_depth - 1)]
        widths.append(sizes.d_fourier)
        layers = [nn.Linear(ins, outs) for ins, outs in itertools.pairwise(widths)]
        self.layers = nn.ModuleList(layers)
        # Differences of m/z stay as large through the layers as they come in; torch's default
        # shrinks them until all peaks look alike. The sum over the last layer's features, which is
        # the attention's bias, begins near 1. Source of the hidden layers' scale: He et al. 2015,
        # arXiv 1502.01852.
        *hidden, last = layers
        for layer in hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.normal_(last.weight, std=last.weight.numel() ** -0.5)
        for layer in layers:
            nn.init.zeros_(layer.bias)

    def forward(self, mz_BN: Tensor) -> Tensor:
        """Return the features.

        Args:
            mz_BN: (B, N) m/z in float64.

        Returns:
            (B, N, d_fourier) in the weights' precision.
        """
        first, *others = self.layers
        assert isinstance(first, nn.Linear)
        mz_M = mz_BN.reshape(-1).double()
        if self._chunk:
            frequencies = self.frequencies.double()
            with torch.autocast(mz_M.device.type, enabled=False):
                out = _FourierLinear.apply(mz_M, frequencies, first.weight, first.bias, self._chunk)
        else:
            out = first(fourier_features(mz_M, self.frequencies.double(), first.weight.dtype))
        for layer in others:
            out = layer(torch.relu(out))
        return out.view(*mz_BN.shape, -1)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the module, but keep the frequencies in double precision."""
        moved = super()._apply(fn, recurse)
        if self.frequencies.dtype != torch.float64:
            exact = frequencies_of(self.mz_accuracy)
            self.frequencies = exact.to(self.frequencies.device)
        return moved


def fourier_features(mz_M: Tensor, frequencies_F: Tensor, dtype: torch.dtype) -> Tensor:
    """Return all features at once, as the document builds them.

    Returns:
        (M, 2F): cosines, then sines.
    """
    _, cosines, sines = next(_parts(mz_M, frequencies_F, dtype, len(frequencies_F)))
    return torch.cat([cosines, sines], dim=1)
