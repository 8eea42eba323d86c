"""``--qlora``: 4-bit weights and adapters in the transformer blocks, and what they save."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from memfit.strategies.four_bit_base import PACKED, FourBitBase
from memfit_workloads.trident.attention import TransformerLayer
from memfit_workloads.trident.model import TridentNet
from memfit_workloads.trident.sizes import TridentSizes

_RANKS = (16, 4)
"""The adapters' rank: the usual one, and that of layers too narrow for it."""
_NARROW = 64
_BYTES_PER_WEIGHT = 4 + 4
"""A weight and its gradient, in fp32; the optimizer's states come on top."""
_PACKED_BYTES_PER_WEIGHT = 0.516
"""Half a byte, and scales of blocks that are quantised too (Dettmers et al. 2023, section 3)."""


def four_bit_base(sizes: TridentSizes) -> FourBitBase:
    """Return the strategy: transformer blocks alone are packed, and all else is trained."""
    return FourBitBase(
        rank=_rank(sizes),
        alpha=2 * _rank(sizes),
        only=tuple(name for name, _ in _blocks(sizes)),
        freezes=PACKED,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitFigures:
    """Count what is packed, in what whole, and the bytes that it saves."""

    num_packed: int
    num_weights: int
    saved_bytes: int
    """Of weights, gradients and the optimizer's states, less those of the adapters."""


def four_bit_figures(sizes: TridentSizes, states_per_weight: float) -> FourBitFigures:
    """Count for a model of these sizes, with so many bytes of states to a weight."""
    layers = [
        layer for _, block in _blocks(sizes) for layer in block.modules()
        if isinstance(layer, nn.Linear)
    ]  # fmt: skip
    num_packed = sum(layer.weight.numel() for layer in layers)
    sides = sum(layer.in_features + layer.out_features for layer in layers)
    num_adapted = _rank(sizes) * sides
    per_trained = _BYTES_PER_WEIGHT + states_per_weight
    saved = num_packed * (per_trained - _PACKED_BYTES_PER_WEIGHT) - num_adapted * per_trained
    return FourBitFigures(
        num_packed=num_packed, num_weights=num_weights(sizes), saved_bytes=round(saved)
    )


def num_weights(sizes: TridentSizes) -> int:
    """Count all parameters of a model of these sizes."""
    return sum(each.numel() for each in on_meta(sizes).parameters())


def _blocks(sizes: TridentSizes) -> list[tuple[str, nn.Module]]:
    modules = on_meta(sizes).named_modules()
    return [(name, module) for name, module in modules if isinstance(module, TransformerLayer)]


def on_meta(sizes: TridentSizes) -> TridentNet:
    """Build the model without values."""
    with torch.device("meta"):
        return TridentNet(sizes)


def _rank(sizes: TridentSizes) -> int:
    usual, narrow = _RANKS
    return narrow if sizes.tempo_width < _NARROW else usual
